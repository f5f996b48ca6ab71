"""What an objective did to each token, and the sums that its metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asymgrpo.objective.ratio import beyond_thresholds

if TYPE_CHECKING:
    from asymgrpo.objective.config import RatioConfig


@dataclass(frozen=True)
class TokenTrace:
    """Each [B, T], detached, 0 outside the mask."""

    weight: Tensor
    """Factor of grad log pi in the token's part of the objective, before aggregation."""
    discount: Tensor
    """The horizon's weight; 1 where it does not apply."""
    ratio: Tensor
    surrogate: Tensor
    """The token's part of the objective, before aggregation."""
    quadrant: Tensor
    """int8: 0 inside the thresholds, else 1 to 4."""
    clipped: Tensor
    """bool: whether the ratio lies outside the clip's interval."""


METRIC_SUMS = (
    "entropy/mean",
    "entropy/positive",
    "entropy/negative",
    "horizon/effective",
    "horizon/removed",
    "clip/q1",
    "clip/q2",
    "clip/q3",
    "clip/q4",
    "ratio/mean",
    "kl/mean",
)


@dataclass(frozen=True)
class MetricSums:
    """Numerators and denominators, so that several processes can add theirs before dividing.

    >>> totals = torch.zeros(len(METRIC_SUMS), 2)
    >>> totals[METRIC_SUMS.index("ratio/mean")] = torch.tensor([6.0, 4.0])
    >>> MetricSums(totals, torch.tensor(2.5)).means()
    {'ratio/mean': 1.5, 'ratio/max': 2.5}
    """

    totals: Tensor
    """[M, 2], float64: numerator and denominator of each of METRIC_SUMS."""
    largest_ratio: Tensor
    """Scalar."""

    def __add__(self, other: MetricSums) -> MetricSums:
        """The sums of two batches together."""
        largest = torch.maximum(self.largest_ratio, other.largest_ratio)
        return MetricSums(self.totals + other.totals, largest)

    def means(self) -> dict[str, float]:
        """Metrics by name; one that nothing was measured for is left out."""
        named = zip(METRIC_SUMS, self.totals.tolist(), strict=True)
        means = {name: top / bottom for name, (top, bottom) in named if bottom}
        if "ratio/mean" in means:
            means["ratio/max"] = self.largest_ratio.item()
        return means


class Measured(NamedTuple):
    """What the metrics are read from: columns of a cleaned batch, detached."""

    mask: Tensor  # [B, T]
    advantages: Tensor  # [B]
    discounted: Tensor  # [B] bool: the rollouts that the horizon applies to
    weights: Tensor | None  # [B, T] the horizon's
    ratio: Tensor  # [B, T or 1]
    undiscounted: Tensor  # [B, T] the surrogate before the horizon
    surrogate: Tensor  # [B, T]
    entropies: Tensor | None  # [B, T]
    kl: Tensor | None  # [B, T]


def sum_metrics(values: Measured, config: RatioConfig) -> MetricSums:
    """Sums over a batch: along each rollout, then over those that a metric speaks of."""
    mask, lengths = values.mask, values.mask.sum(1)
    positive, negative = values.advantages > 0, values.advantages < 0
    every, nothing = torch.ones_like(positive), torch.zeros_like(lengths)

    def total(column: Tensor | None) -> tuple[Tensor, Tensor]:
        if column is None:
            return nothing, nothing
        return torch.where(mask, column, 0.0).sum(1), lengths

    above, below = (
        (beyond & mask).sum(1)
        for beyond in beyond_thresholds(values.ratio, values.advantages.unsqueeze(1), config)
    )
    ratio = torch.where(mask, values.ratio, 0.0)
    mass, _ = total(values.undiscounted.abs())
    mass = nothing if values.weights is None else mass  # without a horizon nothing is asked
    kept, _ = (mass, lengths) if values.weights is None else total(values.surrogate.abs())
    spent, _ = total(values.weights)
    rows = [  # which rollouts, numerators [B], denominators [B]
        (every, *total(values.entropies)),
        (positive, *total(values.entropies)),
        (negative, *total(values.entropies)),
        (values.discounted, spent / lengths.clamp(min=1), lengths > 0),
        (negative, mass - kept, mass),
        (every, above * positive, lengths),
        (every, below * positive, lengths),
        (every, below * negative, lengths),
        (every, above * negative, lengths),
        (every, ratio.sum(1), lengths),
        (every, *total(values.kl)),
    ]
    totals = [
        torch.where(rollouts, torch.stack([top.double(), bottom.double()]), 0.0).sum(1)
        for rollouts, top, bottom in rows
    ]
    largest = ratio.amax() if ratio.numel() else ratio.new_zeros(())
    return MetricSums(torch.stack(totals), largest.double())
