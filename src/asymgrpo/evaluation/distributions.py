"""Quantiles of the t, F and chi-square distributions in numpy; scipy is not a dependency."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NORMAL_LIMIT = 1_000
"""Degrees of freedom above which t is taken from its expansion about the normal."""


def incomplete_beta(a: float, b: float, x: Array) -> Array:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz).

    >>> round(float(incomplete_beta(2.0, 3.0, np.array(0.5))), 4)
    0.6875
    """
    x = np.asarray(x, dtype=np.float64)
    # The fraction converges fast only below the mean; above it the complement is used.
    swap = x > (a + 1) / (a + b + 2)
    first, second = np.where(swap, b, a), np.where(swap, a, b)
    point = np.clip(np.where(swap, 1 - x, x), 1e-300, 1.0)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    rest = np.log1p(-np.minimum(point, 1 - 1e-16))
    front = np.exp(first * np.log(point) + second * rest - log_beta) / first
    value = front * _beta_fraction(first, second, point)
    return np.asarray(np.where(swap, 1 - value, value))


def _beta_fraction(a: Array, b: Array, x: Array, terms: int = 200) -> Array:
    tiny = 1e-300
    upper = np.ones_like(x)
    lower = 1 / (1 - (a + b) * x / (a + 1))
    value = lower.copy()
    for m in range(1, terms):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            lower = 1 / np.where(np.abs(1 + factor * lower) < tiny, tiny, 1 + factor * lower)
            upper = 1 + factor / np.where(np.abs(upper) < tiny, tiny, upper)
            value = value * upper * lower
        if np.all(np.abs(upper * lower - 1) < 1e-15):
            break
    return value


def _bisect(cdf: Callable[[Array], Array], q: Array, low: float, high: float) -> Array:
    below, above = np.full(q.shape, low), np.full(q.shape, high)
    for _ in range(64):
        middle = (below + above) / 2
        small = cdf(middle) < q
        below, above = np.where(small, middle, below), np.where(small, above, middle)
    return np.asarray((below + above) / 2)


def student_t_quantiles(q: Array, df: int) -> Array:
    """Quantiles of Student's t with `df` degrees of freedom.

    >>> [round(float(t), 3) for t in student_t_quantiles(np.array([0.5, 0.975]), 4)]
    [0.0, 2.776]
    """
    q = np.asarray(q, dtype=np.float64)
    if df > _NORMAL_LIMIT:
        z = np.vectorize(NormalDist().inv_cdf)(q)
        return np.asarray(z + (z**3 + z) / (4 * df))
    tail = np.minimum(q, 1 - q)
    # Bisecting in cos^2 = df / (df + t^2), which lies in (0, 1), covers the heavy tails.
    x = _bisect(lambda x: _t_tails(x, df), 2 * tail, 0.0, 1.0)
    size = np.sqrt(df * (1 - x) / np.maximum(x, 1e-300))
    return np.asarray(np.where(q < 0.5, -size, np.where(q > 0.5, size, 0.0)))


def _t_tails(cos2: Array, df: int) -> Array:
    """P(|T| > t) at cos^2 = df / (df + t^2): for whole df a finite sum."""
    sine = np.sqrt(1 - cos2)
    odd = df % 2
    term = np.sqrt(cos2) if odd else np.ones_like(cos2)
    total = np.zeros_like(cos2)
    for i in range(df // 2):
        total = total + term
        term = term * cos2 * ((2 * i + 1 + odd) / (2 * i + 2 + odd))
    if odd:
        angle = np.arctan2(sine, np.sqrt(cos2))
        return np.asarray(1 - 2 / math.pi * (angle + sine * total))
    return np.asarray(1 - sine * total)


@lru_cache(maxsize=1024)
def student_t_quantile(q: float, df: int) -> float:
    """One quantile of Student's t.

    >>> round(student_t_quantile(0.975, 1), 3)
    12.706
    """
    return float(student_t_quantiles(np.array(q), df))


def f_quantile(q: float, df1: int, df2: int) -> float:
    """A quantile of the F distribution.

    >>> round(f_quantile(0.95, 4, 4), 3)
    6.388
    """
    # F = (df2 / df1) x / (1 - x) where x has the beta distribution.
    x = float(_bisect(lambda x: incomplete_beta(df1 / 2, df2 / 2, x), np.array(q), 0.0, 1.0))
    return df2 / df1 * x / (1 - x)


def chi_square_quantile(q: float, df: int) -> float:
    """A quantile of the chi-square distribution with whole degrees of freedom.

    >>> round(chi_square_quantile(0.975, 4), 3)
    11.143
    """

    odd = df % 2
    powers = [i + odd / 2 for i in range(df // 2)]

    def cdf(x: Array) -> Array:
        half = float(x) / 2
        # For whole df the integral ends after df // 2 terms: from erf if odd, from 1 if even.
        head = math.erf(math.sqrt(half)) if odd else 1.0
        terms = (math.exp(p * math.log(half) - half - math.lgamma(p + 1)) for p in powers)
        return np.asarray(head - sum(terms))

    return float(_bisect(cdf, np.array(q), 1e-12, df + 20 * math.sqrt(2 * df) + 40))
