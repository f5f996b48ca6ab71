"""Per-problem estimates from n samples: pass@k, avg@k, maj@k. Each is unbiased for any k <= n."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CORRECT = 1.0
"""A sample counts as correct from this score on; partial credit counts in avg@k only."""


def _check_k(n: int, k: int) -> None:
    for name, value in (("n", n), ("k", k)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and n = {n}, not {k}")


@lru_cache(maxsize=65_536)
def _pass_at_k(n: int, c: int, k: int) -> float:
    # Whole numbers of any size, divided once: no overflow, and correctly rounded.
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c correct ones.

    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, arXiv 2107.03374): unbiased for the chance that
    at least one of k fresh samples is correct.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4), pass_at_k(10_000, 1, 5_000)
    (0.5, 0.8333, 0.5)
    """
    _check_k(n, k)
    if isinstance(c, bool) or not isinstance(c, int | np.integer):
        raise ValueError(f"c must be a whole number, not {c!r}")
    if not 0 <= c <= n:
        raise ValueError(f"c must be between 0 and n = {n}, not {c}")
    return _pass_at_k(int(n), int(c), int(k))


def check_scores(scores: Sequence[float]) -> None:
    """A score is a number from 0 to 1; anything else would pass for a wrong or a right answer.

    >>> check_scores([1.0, math.nan])
    Traceback (most recent call last):
    ...
    ValueError: a score is a number from 0 to 1, not nan
    """
    for score in scores:
        number = isinstance(score, int | float | np.number)
        if not number or not 0.0 <= score <= 1.0:  # not so for NaN either
            raise ValueError(f"a score is a number from 0 to 1, not {score}")


def count_correct(scores: Sequence[float]) -> int:
    """How many samples are correct.

    >>> count_correct([1.0, 0.0, 0.4, 1.0])
    2
    """
    check_scores(scores)
    return sum(score >= CORRECT for score in scores)


def avg_at_k(scores: Sequence[float], k: int | None = None) -> float:
    """The expected mean score of k samples, which for every k is the mean over all n.

    >>> avg_at_k([1.0, 0.0, 0.5, 0.5])
    0.5
    """
    _check_k(len(scores), len(scores) if k is None else k)
    check_scores(scores)
    return math.fsum(scores) / len(scores)


def maj_at_k(
    answers: Sequence[Hashable | None], scores: Sequence[float], k: int | None = None
) -> float:
    """The expected score of the majority's answer among k of the n samples; k = n by default.

    A sample whose answer is None does not vote; if nobody votes the score is 0. A tie is broken
    evenly at random, in expectation. An answer's score is the mean score of its samples. For
    k < n the expectation over all C(n, k) subsets is exact.

    >>> maj_at_k(["4", "4", "5", None], [1.0, 1.0, 0.0, 0.0])
    1.0
    >>> maj_at_k(["4", "5", None], [1.0, 0.0, 0.0])
    0.5
    """
    n = len(answers)
    if len(scores) != n:
        raise ValueError(f"{n} answers but {len(scores)} scores")
    k = n if k is None else k
    _check_k(n, k)
    check_scores(scores)
    groups: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            groups.setdefault(answer, []).append(score)
    ballot = sorted((len(group), math.fsum(group) / len(group)) for group in groups.values())
    return _majority(tuple(ballot), n, int(k))


@lru_cache(maxsize=65_536)
def _majority(ballot: tuple[tuple[int, float], ...], n: int, k: int) -> float:
    """`ballot` has the votes and the score of each answer among the n samples."""
    if not ballot:
        return 0.0
    if k == n:
        most = max(votes for votes, _ in ballot)
        winners = [score for votes, score in ballot if votes == most]
        return math.fsum(winners) / len(winners)
    p = k / n
    total = sum(_won_with(ballot, n, k, p, top) for top in range(1, min(k, ballot[-1][0]) + 1))
    return total / _binomial(n, p, k)


def _won_with(ballot: tuple[tuple[int, float], ...], n: int, k: int, p: float, top: int) -> float:
    """Sum over the events in which the winners have exactly `top` votes of chance times score.

    Drawing k of n without replacement is drawing each answer's votes from Binomial(votes, p) for
    any p, given that they sum to k: independent answers, and no large binomial coefficients.
    """
    ties = min(k // top, len(ballot))
    # state[0, v, t]: the chance of v votes so far and t answers at the top; state[1] is the same
    # times the sum of those answers' scores.
    state = np.zeros((2, k + 1, ties + 1))
    state[0, 0, 0] = 1.0
    for votes, score in ballot:
        new = _binomial(votes, p, 0) * state
        for drawn in range(1, min(votes, top - 1) + 1):
            new[:, drawn:] += _binomial(votes, p, drawn) * state[:, : k + 1 - drawn]
        if votes >= top:
            won = _binomial(votes, p, top) * state[:, : k + 1 - top, :-1]
            won[1] += score * won[0]
            new[:, top:, 1:] += won
        state = new
    silent = n - sum(votes for votes, _ in ballot)
    rest = np.array([_binomial(silent, p, k - voted) for voted in range(k + 1)])
    return float((rest @ state[1, :, 1:] / np.arange(1, ties + 1)).sum())


@lru_cache(maxsize=65_536)
def _binomial(n: int, p: float, drawn: int) -> float:
    if drawn > n:
        return 0.0
    log_choose = math.lgamma(n + 1) - math.lgamma(drawn + 1) - math.lgamma(n - drawn + 1)
    return math.exp(log_choose + drawn * math.log(p) + (n - drawn) * math.log1p(-p))
