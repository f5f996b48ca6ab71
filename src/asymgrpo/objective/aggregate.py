"""Token losses [B, T] to a scalar."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asymgrpo.objective.masked import masked_mean, masked_sum


class Counts(NamedTuple):
    """What sums are divided by; a batch that is a slice of a larger one states that one's."""

    tokens: Tensor | float
    rollouts: Tensor | float
    max_length: int


def sequence_mean(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Mean over each rollout's tokens, then over rollouts (GRPO)."""
    return masked_mean(losses, mask, dim=1).sum() / counts.rollouts


def token_mean(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Mean over all tokens, so that long rollouts weigh more (DAPO)."""
    return masked_sum(losses, mask, dim=None) / counts.tokens


def fixed_length(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Sum over tokens by a constant length, so that a token weighs the same anywhere (Dr. GRPO)."""
    return masked_sum(losses, mask, dim=None) / (counts.rollouts * counts.max_length)


AGGREGATES = {
    "sequence-mean": sequence_mean,
    "token-mean": token_mean,
    "fixed-length": fixed_length,
}


def aggregate(
    losses: Tensor,
    mask: Tensor,
    how: str,
    *,
    token_count: Tensor | float | None = None,
    rollout_count: Tensor | float | None = None,
    max_length: int | None = None,
) -> Tensor:
    """`losses` [B, T] under the boolean `mask` [B, T] to a scalar.

    Left out, the counts are this batch's own: its tokens, its rollouts that have any, and T.

    >>> import torch
    >>> losses, mask = torch.tensor([[3.0, 0.0], [2.0, 2.0]]), torch.tensor([[1, 0], [1, 1]]).bool()
    >>> [round(aggregate(losses, mask, how).item(), 3) for how in AGGREGATES]
    [2.5, 2.333, 1.75]
    """
    if how not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {how!r}")
    if losses.dim() != 2 or mask.shape != losses.shape:
        raise ValueError(
            f"losses and mask must be [B, T], got {tuple(losses.shape)}, {tuple(mask.shape)}"
        )
    counts = Counts(
        tokens=mask.sum().clamp(min=1) if token_count is None else token_count,
        rollouts=mask.any(1).sum().clamp(min=1) if rollout_count is None else rollout_count,
        max_length=mask.shape[1] if max_length is None else max_length,
    )
    return AGGREGATES[how](losses, mask, counts)
