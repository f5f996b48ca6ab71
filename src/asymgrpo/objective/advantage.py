"""Rewards to advantages, group by group.

GRPO (2402.03300): A = (R - mean_g R) / (std_g R + eps). Dr. GRPO (2503.20783) drops the division.
RLOO's baseline is the mean of the *other* rollouts of the group.

The sign of an advantage decides how its rollout is treated, so rounding must not make one: where
R lies no further from its baseline than rounding can have moved the two, A is exactly 0. A group
whose rewards are equal up to rounding has no advantages at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_EPS = 1e-4
"""Added to the standard deviation; TRL's value, so that the two agree."""

BASELINES = ("mean", "leave-one-out")
SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    group_size: int,
    baseline: str = "mean",
    scale: str = "group",
    rounding: Tensor | None = None,
) -> Tensor:
    """`rewards` [B], rollouts of a prompt side by side, to advantages [B].

    A NaN reward is a rollout that could not be scored: it takes no part in its group's baseline
    and scale, and its advantage is 0. The standard deviation is the unbiased one. `rounding` [B]
    is how far each reward may lie from its exact value; left out, half a unit in its last place.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 2, scale="none")
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0]), 3, baseline="leave-one-out", scale="none")
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    rewards = _at_least_float32(rewards)
    grouped, centred = _centred(rewards, group_size, rounding)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    if baseline == "leave-one-out":  # R - mean of the others = (R - mean) * n / (n - 1)
        centred = centred * count / (count - 1).clamp(min=1)
    if scale == "group":
        centred = centred / (_unbiased_std(grouped, 1) + SCALE_EPS)
    elif scale == "batch":
        centred = centred / (_unbiased_std(grouped.reshape(1, -1), 1) + SCALE_EPS)
    return centred.view(-1).to(rewards.dtype)


def equal_groups(rewards: Tensor, group_size: int, rounding: Tensor | None = None) -> Tensor:
    """Which groups [P] of `rewards` [B] are equal up to `rounding` [B], and so teach nothing.

    >>> equal_groups(torch.tensor([0.7, 0.70000005, 0.0, 1.0]), 2)
    tensor([ True, False])
    """
    _, centred = _centred(_at_least_float32(rewards), group_size, rounding)
    return (centred == 0).all(1)


def total_reward(per_function: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums [B] of the rewards [B, F] of F functions, and how far rounding may move them.

    NaN is a reward that does not apply; a rollout without any has a NaN sum. Converting a reward
    and its weight, their product and F - 1 additions round by half a unit of eps each, relative to
    at most the sum of the terms' absolute values.

    >>> totals, rounding = total_reward(torch.tensor([[0.1, 0.6], [0.7, 0.0]]), torch.ones(2))
    >>> bool(totals[0] == totals[1]), equal_groups(totals, 2, rounding)
    (False, tensor([True]))
    """
    if per_function.dim() != 2 or weights.shape != per_function.shape[1:]:
        raise ValueError(
            f"per_function and weights must be [B, F] and [F], got {tuple(per_function.shape)} "
            f"and {tuple(weights.shape)}"
        )
    terms = per_function * weights
    totals = torch.where(terms.isnan().all(1), torch.nan, terms.nansum(1))
    roundings = per_function.shape[1] + 2
    return totals, roundings * torch.finfo(terms.dtype).eps / 2 * terms.abs().nansum(1)


def normalized_sum_advantages(per_function: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """TRL's `normalize_then_sum`: advantages of each function [B, F], weighted and summed to [B].

    The sums are centred and scaled once more, over the whole batch.

    >>> per_function = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> normalized_sum_advantages(per_function, torch.ones(2), 2)
    tensor([0., 0.])
    """
    columns = [group_advantages(column, group_size) for column in per_function.unbind(1)]
    normalized = torch.stack(columns, 1).masked_fill(per_function.isnan(), torch.nan)
    # The advantages themselves carry the rounding of their division, about as much again.
    totals, rounding = total_reward(normalized, weights)
    return group_advantages(totals, len(totals), rounding=2 * rounding)


def _centred(rewards: Tensor, group_size: int, rounding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rewards [P, G] in float64, and their distances from the mean; exactly 0 within rounding."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have shape [B], got {tuple(rewards.shape)}")
    if group_size < 1 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not divide into groups of {group_size}")
    if rounding is None:
        rounding = rewards.abs() * (torch.finfo(rewards.dtype).eps / 2)
    if rounding.shape != rewards.shape:
        raise ValueError(
            f"rounding must have the shape of rewards, {tuple(rewards.shape)}, got "
            f"{tuple(rounding.shape)}"
        )
    grouped = rewards.double().view(-1, group_size)
    scored = ~grouped.isnan()
    # From one of the group's own rewards the distances are small, and so is their rounding here.
    relative = grouped - grouped.nanmedian(1, keepdim=True).values
    centred = relative - relative.nanmean(1, keepdim=True)
    own = torch.where(scored, rounding.double().view(-1, group_size), torch.nan)
    certain = centred.abs() > own + own.nanmean(1, keepdim=True)
    return grouped, torch.where(scored & certain, centred, 0.0)


def _at_least_float32(rewards: Tensor) -> Tensor:
    """Whole numbers and half precision in float32."""
    return rewards if rewards.dtype in (torch.float32, torch.float64) else rewards.float()


def _unbiased_std(values: Tensor, dim: int) -> Tensor:
    """Standard deviation [.., 1] of the values that are not NaN; 0 where fewer than two are."""
    present = ~values.isnan()
    count = present.sum(dim, keepdim=True)
    centred = torch.where(present, values - values.nanmean(dim, keepdim=True), 0.0)
    variance = centred.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt()
