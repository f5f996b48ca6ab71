"""From a completion and a reference to a `Grade`: the named graders.

Where an answer is stated is found by `answers`, what a sentence states by `clauses`. Numbers are
compared exactly and in this process. Whatever else goes to math-verify in a sandbox, which holds
the time and memory limits. `docs/grading.md` states the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from asymgrpo.tasks.answers import (
    LONGEST_TEXT,
    Statement,
    last_boxed,
    last_formula,
    last_number,
    open_box,
    stated_answer,
)
from asymgrpo.tasks.base import Grade
from asymgrpo.tasks.clauses import AmbiguousError, expression_of_clause, value_of_clause
from asymgrpo.tasks.compare import SHOWN, SYMBOLIC, start_math_verify, verdict
from asymgrpo.tasks.quantities import read_quantity
from asymgrpo.tasks.references import Reference, read_choice, read_reference, text_key
from asymgrpo.tasks.words import DOUBTS, NEGATIONS, RETRACTIONS, words_of

__all__ = [
    "GRADERS",
    "SYMBOLIC",
    "Grader",
    "grade_math",
    "grade_number",
    "grade_text",
    "start_math_verify",
]

Grader = Callable[..., Grade]
"""(completion, reference, unevaluated=True) to a grade."""

_CHECK = re.compile(r"[=<>\u2261]|\\equiv")
Fallback = Callable[[str], Statement | None]


def grade_number(completion: str, reference: str, unevaluated: bool = True) -> Grade:
    r"""The last stated number against a number: `#### n`, `the answer is n`, a box, the last one.

    `unevaluated`: whether `48 + 24` counts as 72.

    >>> grade_number("so she pays $1,200.00 in all", "1200").score
    1.0
    >>> grade_number("it is 5 or 6. The answer is 5 or 6", "5").reason
    "ambiguous: 'or' in the answer"
    """
    return _grade_last(completion, reference, last_number, unevaluated)


def grade_math(completion: str, reference: str, unevaluated: bool = True) -> Grade:
    r"""The last stated expression, compared by value as math-verify sees it.

    >>> grade_math(r"Hence \boxed{0.5}.", r"\frac12").score
    1.0
    """
    return _grade_last(completion, reference, _last_formula_or_number, unevaluated)


def grade_text(completion: str, reference: str, unevaluated: bool = True) -> Grade:
    """The last stated answer, or else the whole completion, letter by letter but for the case.

    >>> grade_text("The answer is: North", "north").score
    1.0
    """
    stated = stated_answer(completion)
    answer = stated.text if stated is not None else completion
    key = text_key(answer).casefold()
    right = key == text_key(reference).casefold() and not (stated and stated.problem)
    return _grade(right, answer.strip(), reference, key)


GRADERS: dict[str, Grader] = {"math": grade_math, "number": grade_number, "text": grade_text}


def _grade_last(completion: str, reference: str, fallback: Fallback, unevaluated: bool) -> Grade:
    gold = read_reference(reference)
    completion = completion[-LONGEST_TEXT:]
    statement = _statement(completion, gold, fallback)
    if statement is None:
        return Grade(0.0, None, "no answer was found in the completion")
    if statement.problem is not None:
        return _ambiguous(statement.text, statement.problem)
    if gold.kind == "choice":
        letter = read_choice(statement.text)
        return _grade(letter == gold.text, letter or statement.text, reference, letter)
    try:
        value = _value(statement, gold)
    except AmbiguousError as error:
        return _ambiguous(statement.text, str(error))
    return verdict(value, gold, reference, unevaluated)


def _ambiguous(text: str, problem: str) -> Grade:
    return Grade(0.0, text[:SHOWN], f"ambiguous: {problem}")


def _statement(text: str, gold: Reference, fallback: Fallback) -> Statement | None:
    stated = stated_answer(text, wordy=gold.kind != "number")
    if stated is None:
        if gold.kind == "choice":
            return _last_line(text)
        return open_box(text) or fallback(text)
    boxed = last_boxed(text) if stated.kind == "sentence" and not stated.problem else None
    return boxed if boxed is not None and _only_remarks(stated.text, gold) else stated


def _only_remarks(clause: str, gold: Reference) -> bool:
    """Whether a sentence after a box is a check of it ("our answer: 3 * 4 = 12") and no other."""
    if read_quantity(clause, any_unit=True) is not None:
        return False
    if _CHECK.search(clause):
        return True
    doubted = set(words_of(clause)) & (DOUBTS | NEGATIONS | RETRACTIONS | {"or"})
    return gold.kind == "expression" and not doubted


def _last_line(text: str) -> Statement | None:
    """A choice without any statement is the last line."""
    line = text.rstrip().rpartition("\n")[2].strip()
    return Statement(line, len(text.rstrip()) - len(line), "sentence") if line else None


def _last_formula_or_number(text: str) -> Statement | None:
    formula, number = last_formula(text), last_number(text)
    if formula is not None and (
        number is None or formula.start + len(formula.text) > number.start - 2
    ):
        return formula
    return number


def _value(statement: Statement, gold: Reference) -> str:
    if statement.kind not in ("sentence", "marker"):
        return statement.text
    if gold.kind == "expression":
        return expression_of_clause(statement.text)
    return value_of_clause(statement.text)


def _grade(right: bool, answer: str, reference: str, key: str | None) -> Grade:
    relation = "equal" if right else "not equal"
    reason = f"{relation} to the reference {reference[:SHOWN]}"
    return Grade(float(right), answer[:SHOWN], reason, key=key[:SHOWN] if key else None)
