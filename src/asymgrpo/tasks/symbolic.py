"""Whether two LaTeX answers are equal, by math-verify; runs inside a sandbox only.

Only math-verify's LaTeX reader is used: its reader of plain expressions goes through Python's
`eval`. So does SymPy for every number in a text, until `safe_parsing` takes its place.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (  # type: ignore[import-untyped]
    Expr,
    FiniteSet,
    MatrixExpr,
    Set,
    Tuple,
    UnevaluatedExpr,
)

from asymgrpo.tasks import safe_parsing

_READER = [LatexExtractionConfig(boxed_match_priority=0)]


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> list[Any]:
    return list(
        parse(
            f"\\boxed{{{latex}}}",
            extraction_config=_READER,
            fallback_mode="no_fallback",
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
