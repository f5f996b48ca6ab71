"""What an objective did to each token, and the sums that its metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    >>> sums = MetricSums(torch.zeros(len(METRIC_SUMS), 2), torch.tensor(1.5))
    >>> sums.means()
    {'ratio/max': 1.5}
    """

    totals: Tensor
    """[M, 2], float64: numerator and denominator of each of METRIC_SUMS."""
    largest_ratio: Tensor
    """Scalar."""

    def means(self) -> dict[str, float]:
        """Metrics by name; one that nothing was measured for is left out."""
        named = zip(METRIC_SUMS, self.totals.tolist(), strict=True)
        means = {name: top / bottom for name, (top, bottom) in named if bottom}
        return means | {"ratio/max": self.largest_ratio.item()}


def sum_metrics(
    trace: TokenTrace,
    undiscounted: Tensor,
    mask: Tensor,
    advantages: Tensor,
    discounted: Tensor,
    entropies: Tensor | None,
    kl: Tensor | None,
) -> MetricSums:
    """Sums over a batch.

    `undiscounted` [B, T] is the surrogate before the horizon; `discounted` [B] says which rollouts
    the horizon applies to.
    """
    positive, negative = (advantages > 0).unsqueeze(1), (advantages < 0).unsqueeze(1)
    tokens, lengths = mask.sum(), mask.sum(1)
    nothing = mask.new_zeros((), dtype=torch.float64)

    def over(values: Tensor | None, where: Tensor) -> tuple[Tensor, Tensor]:
        if values is None:
            return nothing, nothing
        return torch.where(where, values, 0.0).sum(dtype=torch.float64), where.sum()

    mass, _ = over(undiscounted.abs(), negative & mask)
    kept, _ = over(trace.surrogate.abs(), negative & mask)
    effective = torch.where(discounted, trace.discount.sum(1) / lengths.clamp(min=1), 0.0)
    rows = [
        over(entropies, mask),
        over(entropies, mask & positive),
        over(entropies, mask & negative),
        (effective.sum(), (discounted & (lengths > 0)).sum()),
        (mass - kept, mass),
        *(((trace.quadrant == q).sum(), tokens) for q in (1, 2, 3, 4)),
        over(trace.ratio, mask),
        over(kl, mask),
    ]
    totals = torch.stack([torch.stack([top.double(), bottom.double()]) for top, bottom in rows])
    largest = trace.ratio.amax() if trace.ratio.numel() else trace.ratio.new_zeros(())
    return MetricSums(totals, largest.double())
