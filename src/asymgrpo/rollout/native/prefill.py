"""The forward pass over prompts, which computes each group's keys and values once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..scheduler import PromptGroup
from .cache_attention import PassThroughCache, PrefillCache, attending_to

Forward = Callable[[Tensor, Tensor, PassThroughCache], Tensor]
"""Tokens `[B, T]`, positions `[B, T]` and a cache to the last position's logits `[B, V]`."""


@dataclass(frozen=True)
class PromptStates:
    """Keys and values by layer, `[groups, H, T, D]`, and the real tokens of each group."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    counts: list[int]


def prompt_states(
    groups: Sequence[PromptGroup], forward: Forward, device: torch.device, most_tokens: int = 16_384
) -> list[PromptStates]:
    """Keys and values of all prompt tokens but the last, one entry per batch of prompts.

    The last token is the first input of decoding, so that every row's first logits come from the
    same code as the others.
    """
    result = []
    start = 0
    while start < len(groups):
        longest = len(groups[start].prompt) - 1
        end = start + max(1, most_tokens // max(1, longest))
        batch = groups[start:end]
        counts = [len(group.prompt) - 1 for group in batch]
        cache = PrefillCache()
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
