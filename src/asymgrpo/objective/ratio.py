"""Ratios to a surrogate, by token or by sequence.

Every hard clip is an interval for the ratio, chosen by the sign of the advantage: the surrogate is
`clamp(r, low, high) * A`, and outside the interval a token's gradient is exactly 0. PPO's
`min(r A, clip(r) A)` is the case without a lower bound where A > 0 and without an upper one where
A < 0; dual clip adds that upper one; ABC-GRPO (2601.03895) sets all four. CISPO (2506.13585)
detaches the clamped ratio and multiplies the log-probability, so clipped tokens keep a gradient;
SAPO (2511.20347) replaces the interval by a sigmoid gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asymgrpo.objective.masked import masked_mean

if TYPE_CHECKING:
    from asymgrpo.objective.config import RatioConfig

LOG_RATIO_LIMIT = 30.0
"""Log-ratios are held within this: e^30 is past any meaning, and sums of its square still fit."""

LEVELS = ("token", "sequence")

Interval = tuple[float, float]
UNBOUNDED: Interval = (-math.inf, math.inf)


class Bounds(NamedTuple):
    """Intervals for the ratio where the advantage is positive, and where it is not."""

    positive: Interval
    negative: Interval


def importance_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, level: str) -> Tensor:
    """`exp(logp - old_logp)`: [B, T] by token, or its geometric mean [B, 1] by sequence (GSPO).

    >>> logps, mask = torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> importance_ratio(logps, logps - math.log(2), mask, "sequence")
    tensor([[2.]])
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    log_ratio = (logps - old_logps).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1)
    return log_ratio.exp()


def ppo_bounds(config: RatioConfig) -> Bounds:
    return Bounds((-math.inf, 1 + config.eps_high), (1 - config.eps_low, math.inf))


def dual_bounds(config: RatioConfig) -> Bounds:
    """PPO's, and the ratio capped at `delta` where A < 0 (2505.07291)."""
    return Bounds((-math.inf, 1 + config.eps_high), (1 - config.eps_low, config.delta))


def four_bounds(config: RatioConfig) -> Bounds:
    return Bounds(
        (1 - config.eps2, 1 + config.eps1),
        (1 - config.eps4, 1 + config.eps3),
    )


def symmetric_bounds(config: RatioConfig) -> Bounds:
    interval = (1 - config.eps_low, 1 + config.eps_high)
    return Bounds(interval, interval)


def no_bounds(config: RatioConfig) -> Bounds:
    return Bounds(UNBOUNDED, UNBOUNDED)


def clamp_by_sign(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """`ratio` [B, T or 1] held in the interval of its rollout's sign; `advantages` [B, 1].

    >>> bounds = Bounds(positive=(0.8, 1.2), negative=(0.8, 3.0))
    >>> clamp_by_sign(torch.tensor([[5.0], [5.0]]), torch.tensor([[1.0], [-1.0]]), bounds)
    tensor([[1.2000],
            [3.0000]])
    """
    low, high = _interval(ratio, advantages, bounds)
    return ratio.clamp(low, high)


def _interval(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    low, high = (
        _by_sign(ratio, advantages, above, below)
        for above, below in zip(bounds.positive, bounds.negative, strict=True)
    )
    return low, high


def _by_sign(ratio: Tensor, advantages: Tensor, positive: float, other: float) -> Tensor:
    """One of two constants a rollout [B, 1], in the ratio's own precision."""
    constants = torch.full_like(advantages, other, dtype=ratio.dtype)
    return constants.masked_fill_(advantages > 0, positive)


def clamped(ratio: Tensor, advantages: Tensor, logps: Tensor, config: RatioConfig) -> Tensor:
    """`clamp(r) A`: no gradient outside the interval."""
    return clamp_by_sign(ratio, advantages, CLIPS[config.clip].bounds(config)) * advantages


def detached(ratio: Tensor, advantages: Tensor, logps: Tensor, config: RatioConfig) -> Tensor:
    """CISPO: `stop_gradient(clamp(r)) A log pi`."""
    bounds = CLIPS[config.clip].bounds(config)
    return clamp_by_sign(ratio.detach(), advantages, bounds) * advantages * logps


def gated(ratio: Tensor, advantages: Tensor, logps: Tensor, config: RatioConfig) -> Tensor:
    """SAPO: `4 / tau * sigmoid(tau (r - 1)) A`, tau by the sign; at r = 1 its gradient is A."""
    tau = _by_sign(ratio, advantages, config.tau_positive, config.tau_negative)
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


class Clip(NamedTuple):
    """How a ratio becomes a surrogate, and the intervals outside of which it is clipped."""

    surrogate: Callable[[Tensor, Tensor, Tensor, RatioConfig], Tensor]
    bounds: Callable[[RatioConfig], Bounds]
    uses: tuple[str, ...] = ("eps_low", "eps_high")
    """The fields of `RatioConfig` that it reads; to set another one is a mistake."""


CLIPS: dict[str, Clip] = {
    "ppo": Clip(clamped, ppo_bounds),
    "dual": Clip(clamped, dual_bounds, ("eps_low", "eps_high", "delta")),
    "four-boundary": Clip(clamped, four_bounds, ("eps1", "eps2", "eps3", "eps4")),
    "cispo": Clip(detached, symmetric_bounds),
    "sapo": Clip(gated, no_bounds, ("tau_positive", "tau_negative")),
    "none": Clip(clamped, no_bounds, ()),
}


def beyond_thresholds(
    ratio: Tensor, advantages: Tensor, config: RatioConfig
) -> tuple[Tensor, Tensor]:
    """Whether a ratio lies above, and below, what eps1 .. eps4 allow its sign: [B, T or 1] each."""
    low, high = _interval(ratio, advantages, four_bounds(config))
    return ratio > high, ratio < low


def quadrants(ratio: Tensor, advantages: Tensor, config: RatioConfig) -> Tensor:
    """ABC-GRPO's quadrants [B, T or 1], int8: 0 within eps1 .. eps4, else 1 to 4.

    Q1: A > 0, r > 1 + eps1. Q2: A > 0, r < 1 - eps2. Q3: A < 0, r < 1 - eps4. Q4: A < 0,
    r > 1 + eps3. Counted against these thresholds whatever the clip is.
    """
    above, below = beyond_thresholds(ratio, advantages, config)
    positive, negative = (advantages > 0).to(torch.int8), (advantages < 0).to(torch.int8)
    return above * (positive + 4 * negative) + below * (2 * positive + 3 * negative)
