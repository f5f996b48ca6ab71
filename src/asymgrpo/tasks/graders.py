"""From a completion and a reference to a `Grade`: the named graders.

Plain numbers are compared exactly and in this process. Whatever else goes to math-verify in a
sandbox, which holds the time and memory limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from asymgrpo.tasks.answers import Statement, expression_answer, numeric_answer, stated_answer
from asymgrpo.tasks.base import Grade
from asymgrpo.tasks.quantities import plain_spelling, read_quantity, same_quantity
from asymgrpo.tasks.sandbox import CallFailedError, shared_sandbox
from asymgrpo.tasks.screen import objection

Grader = Callable[[str, str], Grade]
"""(completion, reference) to a grade."""

SYMBOLIC = "asymgrpo.tasks.symbolic"
SHOWN = 200
"""Characters of an answer that a grade keeps."""

_BASED = re.compile(r"(?P<digits>[0-9A-Za-z]+)_(?:\{(?P<long>\d+)\}|(?P<short>\d+))")
_LAYOUT = re.compile(r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr)(?![A-Za-z])|\\[,;:! ]|\s")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")


def grade_number(completion: str, reference: str) -> Grade:
    r"""The last stated number against a number: `#### n`, `the answer is n`, a box, the last one.

    >>> grade_number("so she pays $1,200.00 in all", "1200").score
    1.0
    >>> grade_number("it is 5 or 6. The answer is 5 or 6", "5")
    Grade(score=0.0, answer='5 or 6', reason='not equal to the reference 5', failed=False)
    """
    return _grade_stated(numeric_answer(completion), reference, any_unit=True)


def grade_math(completion: str, reference: str) -> Grade:
    r"""The last stated expression, compared by value as math-verify sees it.

    >>> grade_math(r"Hence \boxed{0.5}.", r"\frac12").score
    1.0
    """
    return _grade_stated(expression_answer(completion), reference, any_unit=False)


def grade_text(completion: str, reference: str) -> Grade:
    """The last stated answer, or else the whole completion, letter by letter but for the case.

    >>> grade_text("The answer is: North", "north").score
    1.0
    """
    stated = stated_answer(completion)
    answer = stated.text if stated is not None else completion
    right = _text_key(answer).casefold() == _text_key(reference).casefold()
    return _grade(right, answer.strip(), reference)


GRADERS: dict[str, Grader] = {"math": grade_math, "number": grade_number, "text": grade_text}


def start_math_verify() -> None:
    """Let the sandbox come up in the background, before the first answer needs it."""
    shared_sandbox(SYMBOLIC).start()


def _grade_stated(statement: Statement | None, reference: str, any_unit: bool) -> Grade:
    if statement is None:
        return Grade(0.0, None, "no answer was found in the completion")
    answer = statement.text
    gold, found = (read_quantity(text, any_unit) for text in (reference, answer))
    if gold is not None and found is not None:
        return _grade(same_quantity(gold, found), answer, reference)
    if _text_key(answer) == _text_key(reference):
        return _grade(True, answer, reference)
    based = _same_in_base(reference, answer)
    if based is not None:
        return _grade(based, answer, reference)
    against = objection(answer)
    if against is not None:
        return Grade(0.0, answer[:SHOWN], f"the answer is {against}")
    return _grade_symbolic(answer, reference)


def _grade_symbolic(answer: str, reference: str) -> Grade:
    sides = [_for_math_verify(side) for side in (reference, answer)]
    try:
        verdict = shared_sandbox(SYMBOLIC).call("compare", *sides)
    except CallFailedError as failure:
        return Grade(0.0, answer[:SHOWN], f"math-verify failed: {failure}", failed=True)
    if verdict == "reference unreadable":
        reason = f"math-verify cannot read the reference {reference[:SHOWN]}"
        return Grade(0.0, answer[:SHOWN], reason, failed=True)
    if verdict == "answer unreadable":
        return Grade(0.0, answer[:SHOWN], "the answer is no expression that math-verify reads")
    return _grade(verdict == "equal", answer, reference)


def _grade(right: bool, answer: str, reference: str) -> Grade:
    relation = "equal" if right else "not equal"
    return Grade(float(right), answer[:SHOWN], f"{relation} to the reference {reference[:SHOWN]}")


def _for_math_verify(latex: str) -> str:
    """Undo what its reader gets wrong: `1 234` is read as a mixed number, 235."""
    quantity = read_quantity(latex)
    if quantity is None or quantity.unit or quantity.percent:
        return latex
    return f"\\frac{{{quantity.value.numerator}}}{{{quantity.value.denominator}}}"


def _text_key(text: str) -> str:
    r"""A spelling in which `\text{(C)}`, `(C)` and `C`, or `\dfrac12` and `\frac{1}{2}` are one."""
    text = _LAYOUT.sub("", plain_spelling(text)) if len(text) <= 2_000 else text
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    choice = _CHOICE.fullmatch(text)
    if choice is not None:
        return choice[1]
    return text.casefold() if text.isalpha() and len(text) > 1 else text


def _same_in_base(reference: str, answer: str) -> bool | None:
    """`52_8` is not `52_9`, which math-verify takes for equal; a base left out is understood."""
    gold = _BASED.fullmatch(_LAYOUT.sub("", reference))
    if gold is None:
        return None
    found = _BASED.fullmatch(_LAYOUT.sub("", answer[:100]))
    if found is None:
        return gold["digits"] == answer.strip()
    same_base = (gold["long"] or gold["short"]) == (found["long"] or found["short"])
    return same_base and gold["digits"] == found["digits"]
