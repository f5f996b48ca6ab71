"""Whether two LaTeX answers are equal, by math-verify; runs inside a sandbox only.

Only math-verify's LaTeX reader is used: its reader of plain expressions goes through Python's
`eval`. So does SymPy for every number in a text, until `safe_parsing` takes its place.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

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
    equal = verify(gold, found, timeout_seconds=None, raise_on_error=True)
    return "equal" if equal else "different"


def warm_up() -> None:
    """What the server does once, before it forks."""
    safe_parsing.install()
    # The sandbox keeps the time, so math-verify's own limit (a signal) is off; it warns of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Comparing a few fills the parser's tables, so that no worker has to.
    for pair in (
        (r"\frac{3\sqrt{2}}{4}", r"-\frac{3}{2\pi}"),
        (r"(1, 2] \cup [3, \infty)", r"\{1, 2, x^{2} + 3x - 1\}"),
        (r"x = 5", r"5^\circ + 2i"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\sin(\theta) \cdot e^{x}"),
    ):
        compare(*pair)
