"""Token losses [B, T] to a scalar."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asymgrpo.objective.masked import masked_mean, masked_sum


class Counts(NamedTuple):
    """What sums are divided by where a batch is a slice of a larger one; None: by its own."""

    tokens: Tensor | float | None
    rollouts: Tensor | float | None
    max_length: int | None


def sequence_mean(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Mean over each rollout's tokens, then over rollouts (GRPO)."""
    return masked_mean(losses, mask, dim=1).sum() / _rollouts(mask, counts)


def token_mean(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Mean over all tokens, so that long rollouts weigh more (DAPO)."""
    tokens = mask.sum().clamp(min=1) if counts.tokens is None else counts.tokens
    return masked_sum(losses, mask, dim=None) / tokens


def fixed_length(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Sum over tokens by a constant length, so that a token weighs the same anywhere (Dr. GRPO)."""
    length = max(mask.shape[1], 1) if counts.max_length is None else counts.max_length
    return masked_sum(losses, mask, dim=None) / (_rollouts(mask, counts) * length)


def local_token_mean(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Mean over this batch's own tokens, also where it is a slice of a larger one (BNPO)."""
    return masked_mean(losses, mask, dim=None)


def sequence_sum(losses: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Sum over each rollout's tokens, then the mean over rollouts (LUSPO)."""
    return masked_sum(losses, mask, dim=None) / _rollouts(mask, counts)


def _rollouts(mask: Tensor, counts: Counts) -> Tensor | float:
    if counts.rollouts is not None:
        return counts.rollouts
    return (mask.sum(1) > 0).sum().clamp(min=1)


AGGREGATES = {
    "sequence-mean": sequence_mean,
    "token-mean": token_mean,
    "fixed-length": fixed_length,
    "local-token-mean": local_token_mean,
    "sequence-sum": sequence_sum,
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
    [2.5, 2.333, 1.75, 2.333, 3.5]
    """
    if how not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {how!r}")
    if losses.dim() != 2 or mask.shape != losses.shape:
        raise ValueError(
            f"losses and mask must be [B, T], got {tuple(losses.shape)}, {tuple(mask.shape)}"
        )
    return AGGREGATES[how](losses, mask, Counts(token_count, rollout_count, max_length))
