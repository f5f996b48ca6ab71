"""Log-prob and entropy of each target token from hidden states, without the logits.

With logits y = hidden @ weight.T + bias, scaled, soft-capped and divided by the temperature into
z, the log-prob is z_t - log Z and the entropy log Z - E_p[z]. Tiles of [tokens, vocabulary] are
folded into running sums, so memory does not grow with the vocabulary.

Both outputs are scalars per token, so d logp / d hidden is one vector per token:

    (1 - p_t) z'_t W_t - sum over j != t of p_j z'_j W_j,

which the forward pass accumulates along with the sums while it has the tile. The backward pass then
only scales that vector: 4 N V D multiplications in all, instead of 6 N V D with recomputed logits.
The target is left out of the sum because rounding would swamp 1 - p_t. A trainable output
embedding, or a gradient through the entropies, uses the pass that recomputes the logits.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import logit_tiles as tiles

# Tokens and vocabulary entries per tile: on a GPU, a tile stays in L2 between the matrix product
# that writes it and the passes that read it.
TILE = (2048, 8192)


class Head(NamedTuple):
    """The output embedding, and what is applied to its logits before the softmax."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    logit_scale: float
    soft_cap: float | None
    temperature: float


class _Running(NamedTuple):
    """Running sums over the vocabulary, each [n], relative to the maximum so far."""

    maximum: Tensor
    total: Tensor  # sum of exp(z - maximum)
    weighted: Tensor  # sum of exp(z - maximum) (z - maximum)
    target: Tensor  # z of the target


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    chunk: tuple[int, int] = TILE,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, each [N] in float32, of `targets` [N] given `hidden` [N, D].

    `weight` is [V, D], `bias` [V] or None. At most one tile of `chunk` = (tokens, words) logits is
    held at a time. Gradients reach `hidden`, and `weight` and `bias` where they are trainable.

    >>> hidden, weight = torch.zeros(3, 4), torch.zeros(8, 4)
    >>> logps, entropies = token_statistics(hidden, weight, None, torch.tensor([0, 5, 7]))
    >>> torch.allclose(entropies, torch.full((3,), 8.0).log())
    True
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} disagree")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must be [{hidden.shape[0]}]")
    head = Head(weight, bias, logit_scale, soft_cap, temperature)
    head_trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    want_direction = torch.is_grad_enabled() and hidden.requires_grad and not head_trains
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        logps, entropies = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, head, dtype, chunk, want_direction
        )
    return logps, entropies


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        dtype: torch.dtype,
        chunk: tuple[int, int],
        want_direction: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        head = head._replace(weight=weight, bias=bias)
        accumulate = torch.promote_types(dtype, torch.float32)
        logps = torch.empty(len(hidden), dtype=accumulate, device=hidden.device)
        entropies, normalisers = torch.empty_like(logps), torch.empty_like(logps)
        direction = torch.empty_like(hidden) if want_direction else None
        for rows in _ranges(len(hidden), chunk[0]):
            state, found = _fold_rows(
                hidden[rows], targets[rows], head, dtype, chunk[1], want_direction
            )
            normalisers[rows] = state.maximum + state.total.log()
            logps[rows] = state.target - normalisers[rows]
            entropies[rows] = state.total.log() - state.weighted / state.total
            if direction is not None and found is not None:
                direction[rows] = _finish_direction(
                    found, state, logps[rows], targets[rows], head
                ).to(direction.dtype)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies, direction)
        ctx.settings, ctx.dtype, ctx.chunk = head[2:], dtype, chunk
        return logps, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logps, grad_entropies = gradients
        hidden, weight, bias, targets, normalisers, entropies, direction = ctx.saved_tensors
        if grad_logps is None and grad_entropies is None:
            return (None,) * 8
        if direction is not None and grad_entropies is None:
            assert grad_logps is not None
            scaled = grad_logps.unsqueeze(1).to(direction.dtype) * direction
            return (scaled, *(None,) * 7)
        head = Head(weight, bias, *ctx.settings)
        sums = _Gradients.zeros(hidden, head, ctx.needs_input_grad[:3], normalisers.dtype)
        for rows in _ranges(len(hidden), ctx.chunk[0]):
            inputs = hidden[rows].to(ctx.dtype)
            for words in _ranges(len(weight), ctx.chunk[1]):
                columns = weight[words].to(ctx.dtype)
                tile = tiles.logits(inputs, columns, bias, words)
                tile = tiles.gradient(
                    tile,
                    targets[rows],
                    words.start,
                    normalisers[rows],
                    entropies[rows],
                    None if grad_logps is None else grad_logps[rows],
                    None if grad_entropies is None else grad_entropies[rows],
                    head,
                    ctx.dtype,
                )
                sums.add(tile, inputs, columns, rows, words)
        return (*sums.cast(hidden, head), *(None,) * 5)


class _Gradients(NamedTuple):
    """Sums of the gradients over tiles, in float32 or wider."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(
        cls, hidden: Tensor, head: Head, needed: tuple[bool, ...], dtype: torch.dtype
    ) -> _Gradients:
        sources = (hidden, head.weight, head.bias)
        return cls(
            *(
                torch.zeros_like(source, dtype=dtype) if need and source is not None else None
                for source, need in zip(sources, needed, strict=True)
            )
        )

    def add(self, tile: Tensor, inputs: Tensor, columns: Tensor, rows: slice, words: slice) -> None:
        if self.hidden is not None:
            tiles.add_product(self.hidden[rows], tile, columns)
        if self.weight is not None:
            tiles.add_product(self.weight[words], tile.t(), inputs)
        if self.bias is not None:
            self.bias[words] += tile.sum(0, dtype=self.bias.dtype)

    def cast(self, hidden: Tensor, head: Head) -> tuple[Tensor | None, ...]:
        sources = (hidden, head.weight, head.bias)
        return tuple(
            None if sum_ is None or source is None else sum_.to(source.dtype)
            for sum_, source in zip(self, sources, strict=True)
        )


def _fold_rows(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    dtype: torch.dtype,
    words_a_tile: int,
    want_direction: bool,
) -> tuple[_Running, Tensor | None]:
    """Running sums of `hidden` [n, D] over the vocabulary; and the direction's sum over j != t."""
    accumulate = torch.promote_types(dtype, torch.float32)
    state = _Running(*torch.zeros(4, len(hidden), dtype=accumulate, device=hidden.device))
    state.maximum.fill_(-1e30)
    inputs = hidden.to(dtype)
    found = None
    if want_direction:
        found = torch.zeros_like(hidden, dtype=accumulate)
    for words in _ranges(len(head.weight), words_a_tile):
        columns = head.weight[words].to(dtype)
        tile = tiles.logits(inputs, columns, head.bias, words)
        factors = tiles.fold(
            tile, targets, words.start, state, head, dtype if want_direction else None, found
        )
        if found is not None and factors is not None:
            tiles.add_product(found, factors, columns)
    return state, found


def _finish_direction(
    found: Tensor, state: _Running, logps: Tensor, targets: Tensor, head: Head
) -> Tensor:
    rows = head.weight[targets].to(found.dtype)
    # 1 - p_t by expm1, which is accurate where p_t is near one.
    own = -torch.expm1(logps) * tiles.slope(state.target * head.temperature, head)
    outer = head.logit_scale / head.temperature
    return outer * (own.unsqueeze(1) * rows - found / state.total.unsqueeze(1))


def _ranges(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
