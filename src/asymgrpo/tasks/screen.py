"""Answers that no symbolic grader should be handed: they are wrong, and only cost time."""

from __future__ import annotations

import re

LONGEST_ANSWER = 1_000
DEEPEST_NESTING = 10
"""Brackets; the time math-verify takes doubles with every level of them."""
LONGEST_DIGITS = 400

_DIGITS = re.compile(rf"\d{{{LONGEST_DIGITS + 1}}}")
# Two levels (2^{3^2}) are mathematics, three with numbers only serve to hang the reader.
_TOWER = re.compile(r"(?:(?:\^|\*\*)[\s{(]*-?\d+[\s})]*){3}|\d\s*!\s*!\s*!")


def objection(answer: str) -> str | None:
    r"""Why `answer` is not worth reading, or None.

    >>> objection("9**9**9**9")
    'a power tower'
    >>> objection(r"\frac{1}{2}") is None
    True
    """
    if len(answer) > LONGEST_ANSWER:
        return f"longer than {LONGEST_ANSWER:,} characters"
    if _DIGITS.search(answer):
        return f"a number of over {LONGEST_DIGITS} digits"
    if _TOWER.search(answer):
        return "a power tower"
    depth = deepest = 0
    for character in answer:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return f"nested over {DEEPEST_NESTING} deep" if deepest > DEEPEST_NESTING else None
