"""What a run's log says beside its evaluations: training variance, entropy, clipping. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.comparison import Quadrants, RunData

Array = NDArray[np.float64]

REWARD = ("reward/mean", "reward")
ENTROPY = ("entropy/mean", "entropy")
"""Our name of a metric, then TRL's for the same."""
COLLAPSED_BELOW = 0.1
"""Entropy has collapsed when it stays below this share of where it began."""
MIN_STEPS = 8
"""Steps below which a trend cannot be told from noise."""
MIN_SEEDS = 3
"""Seeds below which a variance over them says nothing of its size."""
_DRAWS = 1_000
_LOW, _HIGH = 0.025, 0.975
_SEED = 20_250_214


def series(run: RunData, names: Sequence[str]) -> tuple[Array, Array]:
    """Steps and finite values of the first of `names` that the run logs.

    >>> log = [{"step": 1, "reward": 0.5}, {"step": 2}, {"step": 3, "reward": float("nan")}]
    >>> [part.tolist() for part in series(RunData("a", None, 0, metrics=log), REWARD)]
    [[1.0], [0.5]]
    """
    for name in names:
        rows = {row["step"]: float(row[name]) for row in run.metrics if _is_finite(row.get(name))}
        if rows:
            steps = sorted(rows)
            return np.array(steps, dtype=np.float64), np.array([rows[step] for step in steps])
    return np.empty(0), np.empty(0)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def trend(values: Array) -> tuple[Array, float]:
    """A local linear fit with tricube weights, and the degrees of freedom that it leaves.

    The window reaches a quarter of the run to either side: wide enough to keep the noise, narrow
    enough for a curve that rises and levels off. For white noise the residual sum of squares over
    the degrees of freedom, tr((I - L)'(I - L)) for the linear smoother L, is unbiased.

    >>> line = np.arange(20.0)
    >>> fitted, _ = trend(line)
    >>> bool(np.allclose(fitted, line))
    True
    """
    reach = max(2, math.ceil(len(values) / 4))
    offsets = np.arange(-reach, reach + 1)
    weights = (1 - np.abs(offsets / (reach + 1)) ** 3) ** 3

    def window(kernel: Array, data: Array) -> Array:
        # sum over j of kernel(j - i) data(j): a correlation, hence the reversed kernel
        return np.convolve(data, kernel[::-1])[reach : reach + len(data)]

    ones = np.ones_like(values)
    s0, s1, s2 = (window(weights * offsets**power, ones) for power in range(3))
    t0, t1 = (window(weights * offsets**power, values) for power in range(2))
    determinant = s0 * s2 - s1**2
    fitted = (s2 * t0 - s1 * t1) / determinant
    diagonal = s2 / determinant  # L_ii: the centre has weight 1 and offset 0
    q0, q1, q2 = (window(weights**2 * offsets**power, ones) for power in range(3))
    squares = (s2**2 * q0 - 2 * s1 * s2 * q1 + s1**2 * q2) / determinant**2
    return fitted, float(len(values) - 2 * diagonal.sum() + squares.sum())


@dataclass(frozen=True)
class RewardVariance:
    """Variance over steps of one run's mean batch reward, with draws of its bootstrap."""

    raw: float
    detrended: float
    raw_draws: Array
    detrended_draws: Array


def reward_variance(rewards: Array, draw_seed: int = 0) -> RewardVariance | None:
    """Raw and without the trend; None below `MIN_STEPS` steps.

    Draws keep the fitted trend and put the residuals back in blocks of neighbouring steps, since
    a reward that is high at one step tends to be high at the next.

    >>> found = reward_variance(np.array([0.0, 1.0] * 20))
    >>> round(found.raw, 3) if found else None
    0.256
    """
    steps = len(rewards)
    if steps < MIN_STEPS:
        return None
    fitted, freedom = trend(rewards)
    residuals = rewards - fitted
    detrended = float((residuals**2).sum() / freedom)
    rng = np.random.default_rng((_SEED, draw_seed))
    length = max(1, round(1.5 * steps ** (1 / 3)))
    blocks = math.ceil(steps / length)
    starts = rng.integers(steps, size=(_DRAWS, blocks, 1))
    places = ((starts + np.arange(length)) % steps).reshape(_DRAWS, -1)[:, :steps]
    drawn = (residuals * math.sqrt(steps / freedom))[places]
    return RewardVariance(
        raw=float(rewards.var(ddof=1)),
        detrended=detrended,
        raw_draws=(fitted + drawn).var(axis=1, ddof=1),
        detrended_draws=(drawn**2).mean(axis=1),
    )


def pooled_draws(draws: Sequence[Array]) -> Array:
    """Draws of the mean over runs: runs are resampled, then each gives one of its own draws.

    Labels with equally many runs have the same runs drawn, so that their ratio is paired.

    >>> pooled_draws([np.zeros(_DRAWS), np.ones(_DRAWS)]).shape
    (1000,)
    """
    runs = len(draws)
    picked = np.random.default_rng((_SEED, runs)).integers(runs, size=(_DRAWS, runs))
    stacked = np.stack(draws)
    return np.asarray(stacked[picked, np.arange(_DRAWS)[:, None]].mean(axis=1))


def percentile_estimate(value: float, draws: Array) -> Estimate:
    """The value with the 2.5 % and 97.5 % points of its draws.

    >>> percentile_estimate(20.0, np.arange(41.0))
    Estimate(value=20.0, low=1.0, high=39.0)
    """
    low, high = np.quantile(draws, [_LOW, _HIGH])
    return Estimate(value, float(low), float(high))


def pivotal_estimate(value: float, draws: Array) -> Estimate:
    """A positive value with its interval from draws around it, turned round on the log scale.

    The draws lie about the value as the value lies about the truth, by a factor.

    >>> found = pivotal_estimate(1.0, np.linspace(0.5, 1.0, 41))
    >>> round(found.low or 0, 3), round(found.high or 0, 3)
    (1.013, 1.951)
    """
    if value <= 0:
        return Estimate(value)
    low, high = np.quantile(np.maximum(draws, 1e-300), [_LOW, _HIGH])
    return Estimate(value, float(value**2 / high), float(value**2 / low))


def seed_variance(finals: Sequence[float]) -> Estimate | None:
    """Variance over seeds with its chi-square interval; None with one seed.

    No interval below `MIN_SEEDS`, where it spans three orders of magnitude, or without any spread.

    >>> found = seed_variance([0.5, 0.6, 0.7])
    >>> round(found.value, 3) if found else None
    0.01
    """
    if len(finals) < 2:
        return None
    value, df = float(np.var(finals, ddof=1)), len(finals) - 1
    if len(finals) < MIN_SEEDS or value == 0:
        return Estimate(value)
    return Estimate(
        value,
        value * df / float(special.chdtri(df, _LOW)),
        value * df / float(special.chdtri(df, _HIGH)),
    )


def variance_ratio(own: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Ratio of two variances over seeds with its F interval; None where it says nothing.

    >>> found = variance_ratio([0.5, 0.6, 0.7], [0.5, 0.55, 0.6])
    >>> round(found.value, 3) if found else None
    4.0
    """
    if min(len(own), len(other)) < MIN_SEEDS or np.ptp(other) == 0 or np.ptp(own) == 0:
        return None
    ratio = float(np.var(own, ddof=1) / np.var(other, ddof=1))
    freedom = len(own) - 1, len(other) - 1
    low, high = (ratio / float(special.fdtri(*freedom, q)) for q in (_HIGH, _LOW))
    return Estimate(ratio, low, high)


def mean_over_seeds(values: Sequence[float]) -> Estimate | None:
    """The mean of positive values with Student's t interval over seeds, taken on the log scale.

    No interval with one seed.

    >>> mean_over_seeds([0.5])
    Estimate(value=0.5, low=None, high=None)
    """
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) == 1 or mean <= 0:
        return Estimate(mean)
    half = float(special.stdtrit(len(values) - 1, _HIGH)) * float(
        np.std(values, ddof=1) / math.sqrt(len(values))
    )
    # the same width to first order, and no end below 0
    factor = math.exp(min(half / mean, 700.0))
    return Estimate(mean, mean / factor, mean * factor)


def entropy_end(run: RunData) -> float | None:
    """Mean entropy over the last tenth of the logged steps.

    >>> entropy_end(RunData("a", None, 0, metrics=[{"step": 1, "entropy": 0.25}]))
    0.25
    """
    _, values = series(run, ENTROPY)
    return float(values[-math.ceil(len(values) / 10) :].mean()) if len(values) else None


def collapse_step(run: RunData) -> float | None:
    """The step from which entropy stays below a tenth of its start; None if it does not.

    Entropy is smoothed by a trailing mean over a twentieth of the logged steps, and its start is
    the mean of the first twentieth.

    >>> log = [{"step": s, "entropy": 1.0 if s < 4 else 0.05} for s in range(10)]
    >>> collapse_step(RunData("a", None, 0, metrics=log))
    4.0
    """
    steps, values = series(run, ENTROPY)
    if not len(values):
        return None
    window = math.ceil(len(values) / 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    smooth = (sums[ends] - sums[begins]) / (ends - begins)
    high = np.flatnonzero(smooth >= COLLAPSED_BELOW * values[:window].mean())
    first = int(high[-1]) + 1 if len(high) else 0
    return float(steps[first]) if first < len(values) else None


def majority_median(values: Sequence[float | None]) -> float | None:
    """The median where None is later than any step; None if it falls on one.

    >>> majority_median([30.0, None, 10.0]), majority_median([30.0, None])
    (30.0, None)
    """
    if not values:
        return None
    middle = float(np.median([math.inf if value is None else value for value in values]))
    return middle if math.isfinite(middle) else None


def quadrants(runs: Sequence[RunData]) -> Quadrants | None:
    """Clip shares, the mean over steps of each run and then over runs; None if none are logged.

    >>> log = [{"step": 1, "clip/q1": 0.01, "clip/q2": 0.0, "clip/q3": 0.01, "clip/q4": 0.02}]
    >>> quadrants([RunData("a", None, 0, metrics=log)])
    Quadrants(tokens=(0.01, 0.0, 0.01, 0.02), events=(0.25, 0.0, 0.25, 0.5))
    """
    q1, q2, q3, q4 = (_mean_metric(runs, f"clip/q{number}") for number in range(1, 5))
    if q1 is None and q2 is None and q3 is None and q4 is None:
        return None
    if q1 is None or q2 is None or q3 is None or q4 is None or not (total := q1 + q2 + q3 + q4):
        return Quadrants((q1, q2, q3, q4), None)
    return Quadrants((q1, q2, q3, q4), (q1 / total, q2 / total, q3 / total, q4 / total))


def _mean_metric(runs: Sequence[RunData], name: str) -> float | None:
    means = [
        float(values.mean()) for _, values in (series(run, [name]) for run in runs) if len(values)
    ]
    return float(np.mean(means)) if means else None


def mean_seconds(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean wall time of the runs that say theirs.

    >>> mean_seconds([{"seconds": 10.0}, {}])
    10.0
    """
    known = [float(record["seconds"]) for record in records if _is_finite(record.get("seconds"))]
    return float(np.mean(known)) if known else None
