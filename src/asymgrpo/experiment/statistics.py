"""Tests of a difference that hold with few seeds: a two-way paired bootstrap, Holm's correction.

`D[s, p]` is the difference of two algorithms on problem p with seed s, and its mean varies with the
seeds and with the problems that happened to be drawn. Problems are many, so they are resampled.
Seeds are few: resampling two of them gives the same one twice in half of the draws, and verdicts
that are wrong far more often than 5 %. Their part is drawn from Student's t with S - 1 degrees of
freedom instead, around the observed spread. Problems that come in families are related, and then
the families take the place of the problems. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy import special

from asymgrpo.evaluation.intervals import (
    DRAWS,
    Estimate,
    bootstrap_means,
    families,
    resampled_means,
)

Array = NDArray[np.float64]

ALPHA = 0.05
"""Chance of a wrong verdict over all pairs of a metric."""
POWER = 0.8
"""Chance of a verdict at which the number of further seeds aims."""
MORE_SEEDS_CAP = 100
_SEED = 20_250_131


@dataclass(frozen=True)
class PairedBootstrap:
    """Results of M comparisons, each field [M]."""

    mean: Array
    low: Array
    high: Array
    p_value: Array
    seed_variance: Array
    """Variance of the mean that comes from the seeds; 0 with one seed, where it is not known."""
    problem_variance: Array
    """Variance of the mean that comes from the problems."""
    draws: Array
    """Draws of the mean, in order: [draws, M]."""


def paired_bootstrap(
    differences: Array, clusters: Sequence[Hashable] | None = None
) -> PairedBootstrap:
    """Means of differences [M, S, P] (comparisons, seeds, problems), their intervals and p-values.

    `clusters` names the family of each problem: families are then resampled, not problems.

    >>> wins = np.tile([[0.25, 0.5, 0.0, 0.25]], (3, 1))[None]
    >>> result = paired_bootstrap(wins)
    >>> float(result.mean[0]), bool(result.low[0] < 0.25 < result.high[0])
    (0.25, True)
    """
    if differences.ndim != 3 or differences.shape[1] < 1 or differences.shape[2] < 2:
        raise ValueError(
            f"differences must be [comparisons, seeds, problems] with at least two problems, "
            f"not {differences.shape}"
        )
    mean = differences.mean(axis=(1, 2))
    sums, sizes = families(differences.mean(axis=1).T, clusters)
    units = len(sizes)
    if units < 2:
        raise ValueError("all problems are of one family; at least two are needed")
    seed_part, problem_part, shrink = _variances(_by_family(differences, clusters))
    # as in evaluation/intervals: from the resamples' variance to Student's t
    widen = math.sqrt(units / (units - 1)) * (
        special.stdtrit(units - 1, 1 - ALPHA / 2) / NormalDist().inv_cdf(1 - ALPHA / 2)
    )
    draws = mean + (resampled_means(sums, sizes) - mean) * (widen * shrink)
    if differences.shape[1] > 1:
        draws += _seed_draws(differences.shape[1])[:, None] * np.sqrt(seed_part)
    draws = np.sort(draws, axis=0)
    low, high = ends(draws, ALPHA)
    # A draw within rounding of zero counts on both sides: equal runs have p = 1.
    tolerance = 1e-12
    rarer = np.minimum((draws <= tolerance).sum(axis=0), (draws >= -tolerance).sum(axis=0))
    p_value = np.minimum(2 * (rarer + 1) / (DRAWS + 1), 1.0)
    return PairedBootstrap(mean, low, high, p_value, seed_part, problem_part, draws)


def ends(draws: Array, level: float) -> tuple[Array, Array]:
    """The ends of the interval from draws in order; it leaves out 0 just where p is below `level`.

    >>> [float(end) for end in ends(np.arange(1.0, 5001.0), 0.05)]
    [125.0, 4876.0]
    """
    # p = 2 (k + 1) / (DRAWS + 1) for k draws beyond 0: the most of them that still give a verdict
    beyond = math.ceil(level * (len(draws) + 1) / 2 - 1) - 1
    return draws[max(beyond, 0)], draws[len(draws) - 1 - max(beyond, 0)]


def _by_family(differences: Array, clusters: Sequence[Hashable] | None) -> Array:
    """Values [M, S, U] of families whose plain mean over families is each seed's over problems.

    With `m` a family's mean, `n` its size and `D` the overall mean, `D + n U / P (m - D)`: what a
    family adds to the mean, in first order of its deviation.
    """
    if clusters is None:
        return differences
    comparisons, seeds, problems = differences.shape
    sums, sizes = families(differences.reshape(-1, problems).T, clusters)
    mean = np.repeat(differences.mean(axis=(1, 2)), seeds)
    values = mean + (sums - sizes[:, None] * mean) * (len(sizes) / problems)
    return np.asarray(values.T.reshape(comparisons, seeds, len(sizes)))


def over_seeds_and_problems(
    values: Array, least: float, clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """The mean of [S, P] in `least` to 1, with its interval over seeds and problems.

    As for a difference of two algorithms, so that the two agree; never narrower than over the
    problems alone, which is all that one seed gives. `clusters` as in `paired_bootstrap`.

    >>> one = over_seeds_and_problems(np.array([[0.0, 1.0, 1.0, 0.5]]), 0.0)
    >>> two = over_seeds_and_problems(np.array([[0.0, 1.0, 1.0, 0.5], [0.0, 1.0, 0.5, 0.0]]), 0.0)
    >>> one.value, two.value, two.low <= one.low
    (0.625, 0.5, True)
    """
    by_problem = values.mean(axis=0)
    # the interval over problems is for values from 0 to 1
    means, lows, highs = bootstrap_means(((by_problem - least) / (1 - least))[:, None], clusters)
    mean, low, high = (float(part[0]) * (1 - least) + least for part in (means, lows, highs))
    if min(values.shape) > 1 and (clusters is None or len(set(clusters)) > 1):
        found = paired_bootstrap(values[None], clusters)
        low, high = min(low, float(found.low[0])), max(high, float(found.high[0]))
    return Estimate(mean, max(low, least), min(high, 1.0))


def _variances(differences: Array) -> tuple[Array, Array, Array]:
    """The mean's variance by seeds and by problems, and how far to shrink resampled problems.

    From the mean squares of a two-way layout without replication. What is left over, the
    interaction with the sampling noise, is in both main effects; it is counted once, in the seeds'.
    """
    _, seeds, problems = differences.shape
    mean = differences.mean(axis=(1, 2), keepdims=True)
    by_seed = differences.mean(axis=2, keepdims=True) - mean
    by_problem = differences.mean(axis=1, keepdims=True) - mean
    problem_square = seeds * (by_problem**2).sum(axis=(1, 2)) / (problems - 1)
    cells = seeds * problems
    if seeds == 1:
        none = np.zeros_like(problem_square)
        return none, problem_square / cells, np.ones_like(problem_square)
    rest = ((differences - mean - by_seed - by_problem) ** 2).sum(axis=(1, 2))
    rest /= (seeds - 1) * (problems - 1)
    seed_square = problems * (by_seed**2).sum(axis=(1, 2)) / (seeds - 1)
    # Few seeds can lie close by chance, but their spread is not below that of the noise alone.
    seed_square = np.maximum(seed_square, rest)
    own = np.maximum(problem_square - rest, 0.0)
    shrink = np.sqrt(own / np.where(problem_square > 0, problem_square, 1.0))
    return seed_square / cells, own / cells, shrink


@lru_cache(maxsize=64)
def _seed_draws(seeds: int) -> Array:
    """Student's t in random order, one value from each equal slice: no noise in the tails."""
    slices = (np.arange(DRAWS) + 0.5) / DRAWS
    values = special.stdtrit(seeds - 1, slices)
    drawn: Array = np.random.default_rng((_SEED, seeds)).permutation(values)
    drawn.flags.writeable = False
    return drawn


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: comparing each with alpha bounds the chance of any false one.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """The level that Holm's procedure asks of each p-value.

    >>> holm_levels([0.01, 0.04])
    [0.025, 0.05]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels = [0.0] * len(p_values)
    for rank, i in enumerate(order):
        levels[i] = ALPHA / (len(p_values) - rank)
    return levels


def judged_levels(p_values: Sequence[float]) -> list[float]:
    """The level at which Holm's procedure judges each: it stops at the first that is not below.

    >>> judged_levels([0.04, 0.03])
    [0.025, 0.025]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    levels, stopped = [0.0] * len(p_values), len(p_values)
    for rank, i in enumerate(order):
        rank = min(rank, stopped)
        levels[i] = ALPHA / (len(p_values) - rank)
        if p_values[i] >= levels[i]:
            stopped = min(stopped, rank)
    return levels


def more_seeds(
    difference: float, seed_variance: float, problem_variance: float, seeds: int, level: float
) -> int | None:
    """Further seeds for a verdict at `level` with 80 % chance, if difference and variances hold.

    None if `MORE_SEEDS_CAP` are not enough.

    >>> more_seeds(0.05, seed_variance=0.02**2, problem_variance=0.005**2, seeds=3, level=0.05)
    4
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - level / 2)

    def settles(more: int) -> bool:
        by_seeds = seed_variance * seeds / (seeds + more)
        t = float(special.stdtrit(seeds + more - 1, 1 - level / 2))
        half_width = math.sqrt(t**2 * by_seeds + z**2 * problem_variance)
        spread = math.sqrt(by_seeds + problem_variance)
        return abs(difference) >= half_width + normal.inv_cdf(POWER) * spread

    if not settles(MORE_SEEDS_CAP):
        return None
    return bisect_left(range(1, MORE_SEEDS_CAP), True, key=settles) + 1


def problems_limit(difference: float, problem_variance: float, level: float) -> bool:
    """Whether no number of seeds settles it, since the problems alone leave too much open.

    >>> problems_limit(0.01, 0.01**2, 0.05), problems_limit(0.1, 0.01**2, 0.05)
    (True, False)
    """
    normal = NormalDist()
    needed = normal.inv_cdf(1 - level / 2) + normal.inv_cdf(POWER)
    return abs(difference) <= needed * math.sqrt(problem_variance)
