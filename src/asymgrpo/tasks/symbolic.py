"""Whether two LaTeX answers are equal, by math-verify; runs inside a sandbox only.

Only math-verify's LaTeX reader is used: its reader of plain expressions goes through Python's
`eval`. So does SymPy for every number in a text, until `safe_parsing` takes its place.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import (  # type: ignore[import-untyped]
    Expr,
    FiniteSet,
    Float,
    MatrixExpr,
    Pow,
    Set,
    Tuple,
    UnevaluatedExpr,
    expand,
)

from asymgrpo.tasks import safe_parsing

_READER = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        # Units are read by `quantities`; math-verify would drop words such as "more" and "by".
        normalization_config=NormalizationConfig(
            basic_latex=True, malformed_operators=True, nits=True, boxed="all"
        ),
    )
]
LARGEST_EXPANDED = 20
"""Exponents above it are not multiplied out to name an answer."""


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> list[Any]:
    return list(
        parse(
            f"\\boxed{{{latex}}}",
            extraction_config=_READER,
            fallback_mode="no_fallback",
            # A box that cannot be read is not searched for a fraction that can.
            extraction_mode="first_match",
            parsing_timeout=None,
            raise_on_error=True,
        )
    )


def compare(reference: str, answer: str) -> str:
    r"""`equal`, `different`, or which of the two `unreadable` one is.

    >>> compare(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), compare("x", "x+1")
    ('equal', 'different')
    """
    gold = _parsed(reference)
    if not gold:
        return "reference unreadable"
    found = _parsed(answer)
    if not found:
        return "answer unreadable"
    if _surely_different(gold[0], found[0]):
        return "different"
    equal = verify(gold, found, timeout_seconds=None, raise_on_error=True)
    return "equal" if equal else "different"


def judge(reference: str, answer: str) -> tuple[str, str | None]:
    """The outcome of `compare`, and a name that equal answers share."""
    outcome = compare(reference, answer)
    found = _parsed(answer) if outcome == "different" else []
    return outcome, _name(found[0]) if found else None


def works(reference: str) -> bool:
    r"""Whether comparisons come to an end here: of the reference, and of an ordinary pair."""
    compare(reference, reference)
    return compare(r"\frac{5}{3\sqrt{5}} + x", r"x + \frac{\sqrt{5}}{3}") == "equal"


def _name(found: Any) -> str:
    if not isinstance(found, Expr) or isinstance(found, MatrixExpr) or found.has(UnevaluatedExpr):
        return str(found)
    if found.is_number:
        return str(found.evalf(12))
    powers = found.atoms(Pow)
    small = all(p.exp.is_number and abs(p.exp) <= LARGEST_EXPANDED for p in powers)
    return str(expand(found) if small and len(powers) <= LARGEST_EXPANDED else found)


def rounds_to(exact: str, rounded: str, places: int) -> bool:
    r"""Whether `rounded`, with so many decimal places, is the number `exact` rounded.

    >>> rounds_to(r"\sqrt{2}", "1.41", 2), rounds_to(r"\sqrt{2}", "1.42", 2)
    (True, False)
    """
    found = _parsed(exact)
    if not found or not isinstance(found[0], Expr) or not found[0].is_number:
        return False
    error = abs(found[0] - Float(rounded, 30)).evalf(30)
    return bool(error.is_Float and error * 2 * 10**places <= 1 + 1e-9)


def _surely_different(gold: Any, found: Any) -> bool:
    """What math-verify would find out by simplification, a hundred times slower."""
    collections = [isinstance(side, Set | Tuple) for side in (gold, found)]
    scalars = [
        isinstance(side, Expr) and not isinstance(side, MatrixExpr) for side in (gold, found)
    ]
    if any(collections) and any(scalars):
        sizes = [len(side) for side in (gold, found) if isinstance(side, FiniteSet | Tuple)]
        return sizes != [1]
    if not all(scalars) or not (gold.is_number and found.is_number):
        return False
    if gold.has(UnevaluatedExpr) or found.has(UnevaluatedExpr):
        return False  # a percentage, which equals both of its readings
    difference, size = (abs(value).evalf(20) for value in (gold - found, gold))
    # Far wider than the rounding that math-verify allows for.
    return bool(difference.is_Float and size.is_Float and difference > 1e-4 * max(1, size))


def warm_up() -> None:
    """What the server does once, before it forks."""
    safe_parsing.install()
    # The sandbox keeps the time, so math-verify's own limit (a signal) is off; it warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Reading a few fills the parser's tables, so that no worker has to.
    for latex in (
        r"(1, 2] \cup [3, \infty)",
        r"\{1, 2, x^{2} + 3x - 1\}",
        r"x = 5^\circ + 2i",
        r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]",
        r"\left( \frac{3}{2}, -13 \right)",
        r"x \in [-2, 7]",
        r"((x + 1)^{2} + 1)^{2}",
        r"1 \pm \sqrt{19}",
        r"4210_{5} \text{ cents}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\sin(\theta) \cdot e^{x}",
    ):
        _parsed(latex)
    compare(r"\frac{3\sqrt{2}}{4}", r"\frac{3}{2\sqrt{2}}")
