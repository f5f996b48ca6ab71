"""From a request to waves of rollouts decoded together, and the pass over their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .attention import PassThroughCache, PromptPass, attending_to
from .records import Sampling

Forward = Callable[[Tensor, Tensor, PassThroughCache], Tensor]
"""Tokens `[B, T]`, positions `[B, T]` and a cache to the last position's logits `[B, V]`."""


@dataclass(frozen=True)
class PromptStates:
    """Keys and values by layer, `[groups, H, T, D]`, and how many tokens count in each group."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    counts: list[int]


@dataclass(frozen=True)
class Row:
    """One rollout to make."""

    index: int
    """Its place in the request."""
    seed: int
    limit: int
    """Tokens at most."""


@dataclass(frozen=True)
class Group:
    """Rollouts of one prompt."""

    prompt: tuple[int, ...]
    rows: tuple[Row, ...]


def grouped(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    limits: Sequence[int] | None,
    context: int | None,
    first: int | None,
) -> list[Group]:
    """Equal neighbouring prompts as groups, with what a user can get wrong checked.

    >>> [len(g.rows) for g in grouped([[5], [5], [6]], Sampling(), [0, 1, 2], None, 64, None)]
    [2, 1]
    """
    if len(seeds) != len(prompts) or (limits is not None and len(limits) != len(prompts)):
        raise ValueError("prompts, seeds and limits must have the same length")
    groups: list[tuple[tuple[int, ...], list[Row]]] = []
    for index, (given, seed) in enumerate(zip(prompts, seeds, strict=True)):
        prompt = tuple(given)
        if not prompt:
            if first is None:
                raise UserError(
                    f"prompt {index} is empty and the tokenizer has no first token; give it text"
                )
            prompt = (first,)
        limit = sampling.max_new_tokens if limits is None else limits[index]
        if context is not None:
            if len(prompt) >= context:
                raise UserError(
                    f"prompt {index} has {len(prompt)} tokens, the model's context {context}: "
                    "shorten it, or leave it out"
                )
            limit = min(limit, context - len(prompt))
        if not groups or groups[-1][0] != prompt:
            groups.append((prompt, []))
        groups[-1][1].append(Row(index, _signed(seed), limit))
    return [Group(prompt, tuple(rows)) for prompt, rows in groups]


def _signed(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def waves(groups: Sequence[Group], most_rows: int) -> list[list[Group]]:
    """Groups by falling prompt length in waves of at most so many rows; large groups are split.

    >>> rows = tuple(Row(i, i, 4) for i in range(5))
    >>> [[len(g.rows) for g in wave] for wave in waves([Group((1, 2), rows)], 2)]
    [[2], [2], [1]]
    """
    result: list[list[Group]] = []
    free = 0
    for group in sorted(groups, key=lambda group: -len(group.prompt)):
        rows = group.rows
        # A group that fits a wave but not the rest of this one starts the next, and stays whole.
        if free < len(rows) <= most_rows:
            free = 0
        while rows:
            if free == 0:
                result.append([])
                free = most_rows
            result[-1].append(Group(group.prompt, rows[:free]))
            taken = len(result[-1][-1].rows)
            rows, free = rows[taken:], free - taken
    return result


def prompt_states(
    groups: Sequence[Group], forward: Forward, device: torch.device, most_tokens: int = 16_384
) -> list[PromptStates]:
    """The states of all prompt tokens but the last, one entry a batch of prompts.

    The last token is the first that decoding takes in, so that every row's first logits come from
    the same code as its others.
    """
    result = []
    start = 0
    while start < len(groups):
        longest = len(groups[start].prompt) - 1
        end = start + max(1, most_tokens // max(1, longest))
        batch = groups[start:end]
        counts = [len(group.prompt) - 1 for group in batch]
        cache = PromptPass()
        if longest > 0:
            tokens = torch.zeros(len(batch), longest, dtype=torch.long)
            for row, group in enumerate(batch):
                tokens[row, : counts[row]] = torch.tensor(group.prompt[:-1])
            positions = torch.arange(longest, device=device).expand(len(batch), -1)
            with attending_to(cache):
                forward(tokens.to(device), positions, cache)
        result.append(PromptStates(cache.keys, cache.values, counts))
        start = end
    return result
