"""A 95 % interval for a mean over problems, by a bootstrap that resamples the problems."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

LEVEL = 0.95
DRAWS = 5_000
FEW = 30
"""Problems, or families of them, below which the interval is widened."""
ROUNDING = 1e-9
"""How far beyond 0 and 1 a sum's rounding may lead."""
_SEED = 20_240_229
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; the ends are None where the data cannot give them.

    >>> Estimate(0.5, 0.4, 0.6).as_dict()
    {'value': 0.5, 'low': 0.4, 'high': 0.6}
    """

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


@lru_cache(maxsize=4)
def resample_counts(problems: int, draws: int = DRAWS) -> NDArray[np.uint8]:
    """How often each problem is drawn, [draws, problems]; each row sums to `problems`.

    The draws depend on the number of problems alone, so that everything measured on one set of
    problems is resampled alike, and twice the same data give twice the same interval.

    >>> resample_counts(3, 2).sum(axis=1).tolist()
    [3, 3]
    """
    rng = np.random.default_rng((_SEED, problems))
    counts = np.empty((draws, problems), dtype=np.uint8)
    chunk = max(1, 4_000_000 // problems)
    for start in range(0, draws, chunk):
        rows = min(chunk, draws - start)
        drawn = rng.integers(problems, size=(rows, problems)) + problems * np.arange(rows)[:, None]
        flat = np.bincount(drawn.ravel(), minlength=rows * problems)
        counts[start : start + rows] = flat.reshape(rows, problems)
    counts.flags.writeable = False
    return counts


def resampled_means(sums: Array, sizes: Array, draws: int = DRAWS) -> Array:
    """Means over resampled families with these `sums` [U, M] and `sizes` [U]: [draws, M].

    >>> resampled_means(np.ones((5, 2)), np.ones(5), draws=3).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    return np.asarray(_resampled_sums(sums, draws) / _resampled_sums(sizes[:, None], draws))


def _resampled_sums(values: Array, draws: int = DRAWS) -> Array:
    problems = values.shape[0]
    counts = resample_counts(problems, draws)
    sums = np.empty((draws, values.shape[1]))
    chunk = max(1, 4_000_000 // problems)
    for start in range(0, draws, chunk):
        block = counts[start : start + chunk].astype(np.float64)
        sums[start : start + chunk] = block @ values
    return sums


def bootstrap_means(
    values: Array, clusters: Sequence[Hashable] | None = None
) -> tuple[Array, Array, Array]:
    """Means of the columns of `values` [P, M] with the ends of their intervals, each [M].

    Bias-corrected and accelerated (Efron 1987), at the level that widens it from the normal to
    Student's t with P - 1 degrees of freedom and an unbiased variance, which plain percentiles of
    few problems lack. Values lie in [0, 1]. Where all problems agree no resample differs, and the
    interval is the exact one for the share of problems that do not; no interval is narrower than
    that one, nor, of fewer than `FEW` problems, than Student's: see `docs/evaluation.md`.

    `clusters` names the family of each problem: families are then resampled, not problems.

    >>> mean, low, high = bootstrap_means(np.array([[0.0], [1.0], [1.0], [0.5], [0.0], [1.0]]))
    >>> bool(low[0] < mean[0] < high[0])
    True
    """
    if values.ndim != 2 or values.shape[0] < 1:
        raise ValueError(f"values must be [problems, metrics] with a problem, not {values.shape}")
    if not ((values >= -ROUNDING) & (values <= 1 + ROUNDING)).all():
        raise ValueError("values must be numbers from 0 to 1")
    means = values.mean(axis=0)
    sums, sizes = families(values, clusters)
    units = sums.shape[0]
    low, high = _agreeing(means, units)
    varied = np.ptp(values, axis=0) > 0
    if varied.any() and units > 1:
        near, far = _accelerated(sums[:, varied], sizes, means[varied])
        reach = _student_reach(sums[:, varied], sizes, means[varied]) if units < FEW else 0.0
        low[varied] = np.minimum.reduce([low[varied], near, means[varied] - reach])
        high[varied] = np.maximum.reduce([high[varied], far, means[varied] + reach])
    return means, np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)


def families(values: Array, clusters: Sequence[Hashable] | None) -> tuple[Array, Array]:
    """The sum [U, M] and the size [U] of each family; every problem is one where none is named.

    >>> sums, sizes = families(np.array([[1.0], [0.0], [1.0]]), ["a", "b", "a"])
    >>> sums.tolist(), sizes.tolist()
    ([[2.0], [0.0]], [2.0, 1.0])
    """
    if clusters is None:
        return values, np.ones(values.shape[0])
    if len(clusters) != values.shape[0]:
        raise ValueError(f"{values.shape[0]} problems, but {len(clusters)} clusters")
    places = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    sums, sizes = np.zeros((len(places), values.shape[1])), np.zeros(len(places))
    for name, row in zip(clusters, values, strict=True):
        sums[places[name]] += row
        sizes[places[name]] += 1
    return sums, sizes


def _agreeing(means: Array, units: int) -> tuple[Array, Array]:
    # A share s of other problems is missed by P draws with chance (1 - s)^P; s is its 2.5 % limit.
    share = 1 - ((1 - LEVEL) / 2) ** (1 / units)
    return means * (1 - share), means + (1 - means) * share


def _student_reach(sums: Array, sizes: Array, means: Array) -> Array:
    """Half of Student's interval: resamples of few problems stay within what was seen."""
    units = len(sizes)
    residual = (sums - sizes[:, None] * means) / sizes.mean()
    error = np.sqrt((residual**2).sum(axis=0) / (units * (units - 1)))
    return np.asarray(special.stdtrit(units - 1, (1 + LEVEL) / 2) * error)


def _accelerated(sums: Array, sizes: Array, means: Array) -> tuple[Array, Array]:
    units = len(sizes)
    draws = resampled_means(sums, sizes)
    draws.sort(axis=0)
    tolerance = 1e-12
    below = (draws < means - tolerance).mean(axis=0)
    level_with = (np.abs(draws - means) <= tolerance).mean(axis=0)
    share = np.clip(below + level_with / 2, 1 / DRAWS, 1 - 1 / DRAWS)
    bias = np.array([_NORMAL.inv_cdf(float(s)) for s in share])
    centred = sums - sizes[:, None] * means
    skew = (centred**3).sum(axis=0) / (6 * (centred**2).sum(axis=0) ** 1.5)
    width = special.stdtrit(units - 1, (1 + LEVEL) / 2) * math.sqrt(units / (units - 1))

    def end(z: float) -> Array:
        shifted = bias + z
        # A long tail of few problems can turn the correction round; the extreme draw is the limit.
        scale = np.maximum(1 - skew * shifted, 1e-6)
        return _column_quantiles(draws, np.array([_NORMAL.cdf(x) for x in bias + shifted / scale]))

    return end(-width), end(width)


def _column_quantiles(ordered: Array, q: Array) -> Array:
    """A quantile `q` [M] of each column of `ordered` [draws, M]."""
    last = ordered.shape[0] - 1
    position = np.clip(q * (last + 2) - 1, 0, last)
    lower = np.floor(position).astype(int)
    upper = np.minimum(lower + 1, last)
    columns = np.arange(ordered.shape[1])
    part = position - lower
    return np.asarray(ordered[lower, columns] * (1 - part) + ordered[upper, columns] * part)


def bootstrap_mean(values: Array, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of one value a problem, with its interval; `clusters` as in `bootstrap_means`.

    >>> round(bootstrap_mean(np.zeros(30)).high or 0, 4)
    0.1157
    >>> round(bootstrap_mean(np.zeros(30), clusters=[n // 5 for n in range(30)]).high or 0, 4)
    0.4593
    """
    mean, low, high = bootstrap_means(np.asarray(values, dtype=np.float64)[:, None], clusters)
    return Estimate(float(mean[0]), float(low[0]), float(high[0]))
