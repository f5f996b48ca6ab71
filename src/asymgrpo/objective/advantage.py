"""Rewards to advantages, group by group.

GRPO (2402.03300): A = (R - mean_g R) / (std_g R + eps). Dr. GRPO (2503.20783) drops the division.
RLOO's baseline is the mean of the *other* rollouts of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_EPS = 1e-4
"""Added to the standard deviation; TRL's value, so that the two agree."""

BASELINES = ("mean", "leave-one-out")
SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor, group_size: int, baseline: str = "mean", scale: str = "group"
) -> Tensor:
    """`rewards` [B], rollouts of a prompt side by side, to advantages [B].

    A NaN reward is a rollout that could not be scored: it takes no part in its group's baseline
    and scale, and its advantage is 0. The standard deviation is the unbiased one.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 2, scale="none")
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0]), 3, baseline="leave-one-out", scale="none")
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have shape [B], got {tuple(rewards.shape)}")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of {group_size}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if rewards.dtype not in (torch.float32, torch.float64):
        rewards = rewards.float()  # whole numbers and half precision
    grouped = rewards.view(-1, group_size)  # [P, G]
    scored = ~grouped.isnan()
    count = scored.sum(1, keepdim=True)
    # Measured from one of the group's own rewards, equal ones are exactly 0: the rounding of their
    # mean must not give them a sign.
    relative = grouped - grouped.nanmedian(1, keepdim=True).values
    centred = relative - relative.nanmean(1, keepdim=True)
    if baseline == "leave-one-out":  # R - mean of the others = (R - mean) * n / (n - 1)
        centred = centred * count / (count - 1).clamp(min=1)
    if scale == "group":
        centred = centred / (_unbiased_std(grouped, 1) + SCALE_EPS)
    elif scale == "batch":
        centred = centred / (_unbiased_std(grouped.reshape(1, -1), 1) + SCALE_EPS)
    return torch.where(scored, centred, 0.0).view(-1)


def _unbiased_std(values: Tensor, dim: int) -> Tensor:
    """Standard deviation [.., 1] of the values that are not NaN; 0 where fewer than two are."""
    present = ~values.isnan()
    count = present.sum(dim, keepdim=True)
    centred = torch.where(present, values - values.nanmean(dim, keepdim=True), 0.0)
    variance = centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt()
