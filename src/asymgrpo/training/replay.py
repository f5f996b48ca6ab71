"""Chunks of rollouts whose activations are recomputed, one chunk at a time, in the backward pass.

Beside recomputing, as torch.utils.checkpoint does, it survives running out of memory there: a
chunk's parameter gradients are taken by torch.autograd.grad, which leaves nothing half-added, so
a chunk that does not fit is cut in two and taken again. The sums then enter each parameter's
gradient once, as data-parallel training expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asymgrpo.training.budget import TokenBudget, trainable
from asymgrpo.training.packing import Group, cut

Scores = tuple[Tensor, Tensor]
Run = Callable[[list[Group]], Scores]


def replay(run: Run, chunks: list[list[Group]], causal: nn.Module, budget: TokenBudget) -> Scores:
    """Scores of the chunks in their order; only one chunk's activations ever live."""
    logps, entropies = _Replay.apply(  # type: ignore[no-untyped-call]
        run, chunks, budget, *trainable(causal)
    )
    return logps, entropies


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        chunks: list[list[Group]],
        budget: TokenBudget,
        *parameters: nn.Parameter,
    ) -> Scores:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.chunks, ctx.budget = run, chunks, budget
        ctx.autocast = _autocast_state(parameters[0].device.type)
        ctx.parameters = parameters
        ctx.random_states = []
        parts = []
        for chunk in chunks:
            ctx.random_states.append(_random_state(parameters[0].device))
            parts.append(run(chunk))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        totals: list[Tensor | None] = [None] * len(ctx.parameters)
        start = 0
        with torch.random.fork_rng(devices=_cuda_devices(ctx.parameters[0].device)):
            for chunk, state in zip(ctx.chunks, ctx.random_states, strict=True):
                size = _scored(chunk)
                rows = slice(start, start + size)
                start += size
                _set_random_state(state, ctx.parameters[0].device)
                parts = [None if g is None else g[rows] for g in gradients]
                _add_gradients(ctx, chunk, parts, totals)
        return (None, None, None, *totals)


def _add_gradients(
    ctx: Any, chunk: list[Group], gradients: list[Tensor | None], totals: list[Tensor | None]
) -> None:
    """Add one chunk's parameter gradients to `totals`, cutting the chunk while memory runs out."""
    try:
        found = _chunk_gradients(ctx, chunk, gradients)
    except torch.OutOfMemoryError:
        found = None
    if found is None:
        tokens = sum(group.fed for group in chunk)
        if not ctx.budget.halve(True, tokens):
            _add_gradients(ctx, chunk, gradients, totals)
            return
        halves = cut(chunk, ctx.budget.tokens(True))
        if len(halves) == 1:
            raise torch.OutOfMemoryError("out of memory on a single rollout")
        start = 0
        for half in halves:
            rows = slice(start, start + _scored(half))
            start = rows.stop
            _add_gradients(ctx, half, [None if g is None else g[rows] for g in gradients], totals)
        return
    for index, gradient in enumerate(found):
        if gradient is not None:
            total = totals[index]
            totals[index] = gradient if total is None else total.add_(gradient)


def _chunk_gradients(
    ctx: Any, chunk: list[Group], gradients: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    device, dtype, enabled = ctx.autocast
    with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
        outputs = ctx.run(chunk)
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return (None,) * len(ctx.parameters)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        [o for o, _ in pairs], ctx.parameters, [g for _, g in pairs], allow_unused=True
    )
    return found


def _scored(chunk: list[Group]) -> int:
    return sum(len(x.tokens) for group in chunk for x in group.completions)


def _autocast_state(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), (
        torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    )


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
