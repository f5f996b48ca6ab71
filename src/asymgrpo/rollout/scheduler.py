"""From a request for rollouts to the batches that are decoded together; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError
from .records import Sampling


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to sample."""

    index: int
    """Its position in the caller's list."""
    seed: int
    limit: int
    """New tokens at most."""


@dataclass(frozen=True)
class PromptGroup:
    """Rollouts that share a prompt."""

    prompt: tuple[int, ...]
    rows: tuple[RolloutRequest, ...]


def group_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    limits: Sequence[int] | None,
    context: int | None,
    first: int | None,
) -> list[PromptGroup]:
    """Equal neighbouring prompts as groups; raises UserError for prompts that cannot be sampled.

    >>> groups = group_requests([[5], [5], [6]], Sampling(), [0, 1, 2], None, 64, None)
    >>> [len(group.rows) for group in groups]
    [2, 1]
    """
    if len(seeds) != len(prompts) or (limits is not None and len(limits) != len(prompts)):
        raise ValueError("prompts, seeds and limits must have the same length")
    groups: list[tuple[tuple[int, ...], list[RolloutRequest]]] = []
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
        groups[-1][1].append(RolloutRequest(index, _signed(seed), limit))
    return [PromptGroup(prompt, tuple(rows)) for prompt, rows in groups]


def _signed(seed: int) -> int:
    """Any integer, wrapped to signed 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def batches(groups: Sequence[PromptGroup], most_rows: int) -> list[list[PromptGroup]]:
    """Groups by falling prompt length, in batches of at most `most_rows`; large groups are split.

    >>> rows = tuple(RolloutRequest(i, i, 4) for i in range(5))
    >>> [[len(g.rows) for g in batch] for batch in batches([PromptGroup((1, 2), rows)], 2)]
    [[2], [2], [1]]
    """
    result: list[list[PromptGroup]] = []
    free = 0
    for group in sorted(groups, key=lambda group: -len(group.prompt)):
        rows = group.rows
        # A group that fits a batch, but not the rest of this one, starts the next and stays whole.
        if free < len(rows) <= most_rows:
            free = 0
        while rows:
            if free == 0:
                result.append([])
                free = most_rows
            result[-1].append(PromptGroup(group.prompt, rows[:free]))
            taken = len(result[-1][-1].rows)
            rows, free = rows[taken:], free - taken
    return result
