r"""Whether the value that an answer states is the reference."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from asymgrpo.tasks.base import Grade
from asymgrpo.tasks.closed_form import TooLargeError, UnreadableError, closed_form
from asymgrpo.tasks.quantities import (
    Quantity,
    plain_spelling,
    read_quantity,
    same_quantity,
    shared_value,
)
from asymgrpo.tasks.references import Reference, text_key
from asymgrpo.tasks.sandbox import CallFailedError, shared_sandbox
from asymgrpo.tasks.screen import LONGEST_ANSWER, objection
from asymgrpo.tasks.words import REFUSED, words_of

SYMBOLIC = "asymgrpo.tasks.symbolic"
SHOWN = 200
"""Characters of an answer that a grade keeps."""

_BASED = re.compile(r"([0-9A-Za-z]+)_(?:\{(\d+)\}|(\d+))")
_SPACES = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\s")
_CHAIN = re.compile(r"(?<![<>!:\\])=|\\approx(?![A-Za-z])|\u2248")
_ORDER = re.compile(r"[<>\u2264\u2265]|\\(?:leq?|geq?|lt|gt|neq?|in|pm|mp)(?![A-Za-z])|\u00b1")
_TEXT = re.compile(
    r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?"
)
_TRAILING_UNIT = re.compile(r"(.*[\d)}!])\s+([A-Za-z][A-Za-z ]*)", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAME = re.compile(
    r"\s*[-+]?\s*(?:[^\d=+\-*/^!]|_\{?\w+\}?|\([^()]*\))+(?:[-+]\s*(?:[^\d=+\-*/^!]|_\{?\w+\}?|\([^()]*\))+)*"
)


def start_math_verify() -> None:
    """Let the sandbox come up in the background, before the first answer needs it."""
    shared_sandbox(SYMBOLIC).start()


def verdict(answer: str, gold: Reference, reference: str, unevaluated: bool) -> Grade:
    """The grade of one stated value; `unevaluated` says whether sums and the like count."""
    if gold.quantity is not None:
        found = read_quantity(answer, any_unit=True)
        if found is not None:
            return _graded(same_quantity(gold.quantity, found), answer, gold, found)
    if text_key(answer) == text_key(reference):
        return _result(True, answer, gold)
    if gold.kind == "words":
        return _result(False, answer, gold)
    against = objection(answer)
    if against is not None:
        return _wrong(answer, f"the answer is {against}")
    based = _same_in_base(reference, answer)
    if based is not None:
        return _result(based, answer, gold)
    refused = _refused_word(answer)
    if refused is not None:
        return _wrong(answer, f"ambiguous: {refused!r} in the answer")
    if not gold.has_relation or gold.name is not None:
        members = _CHAIN.split(answer)
        if len(members) > 1:
            return _chain(members, "=" in answer, answer, gold, reference, unevaluated)
    if gold.quantity is not None:
        return _number(answer, gold, reference, unevaluated)
    return _symbolic(answer, gold, reference)


def _number(answer: str, gold: Reference, reference: str, unevaluated: bool) -> Grade:
    """An answer to a number that is not itself written as one."""
    assert gold.quantity is not None
    if _ORDER.search(answer):
        return _wrong(answer, "ambiguous: a relation, no value")
    try:
        value = closed_form(_without_unit(plain_spelling(answer)))
    except TooLargeError:
        return _wrong(answer, "the answer is too large a number")
    except UnreadableError:
        if not unevaluated or _has_variable(answer):
            return _wrong(answer, "the answer is not a number")
        return _symbolic(answer, gold, reference)
    found = Quantity(value)
    right = same_quantity(gold.quantity, found)
    if right and not unevaluated:
        return _wrong(answer, "the answer is not worked out")
    return _graded(right, answer, gold, found)


def _chain(
    members: list[str], exact: bool, answer: str, gold: Reference, reference: str, unevaluated: bool
) -> Grade:
    """`a = b = c` states c, where every other member is a name or is equal to c."""
    sides = [member.strip() for member in members]
    if not all(sides):
        return _wrong(answer, "ambiguous: a relation without one of its sides")
    if "\\approx" in answer or "\u2248" in answer:
        return _approximation(sides, exact, answer, gold, reference, unevaluated)
    last = sides[-1]
    for place, side in enumerate(sides[:-1]):
        if place == 0 and _NAME.fullmatch(side):
            if gold.name is not None and re.fullmatch("[A-Za-z]", side) and side != gold.name:
                return _wrong(answer, f"the value of {side}, not of {gold.name}")
        elif not _equal(side, last):
            return _wrong(answer, "ambiguous: the sides of the equation differ")
    grade = verdict(last, gold, reference, unevaluated)
    return Grade(grade.score, answer[:SHOWN], grade.reason, grade.failed, grade.key)


def _approximation(
    sides: list[str], exact: bool, answer: str, gold: Reference, reference: str, unevaluated: bool
) -> Grade:
    r"""`a \approx b` states a, and b where the reference is a rounded number."""
    if exact or len(sides) > 2 or not _rounds_to(sides[0], sides[1]):
        return _wrong(answer, "ambiguous: no rounding of the number before it")
    grades = [verdict(side, gold, reference, unevaluated) for side in sides]
    best = max(grades, key=lambda grade: grade.score)
    return Grade(best.score, answer[:SHOWN], best.reason, best.failed, best.key)


def _rounds_to(exact: str, rounded: str) -> bool:
    decimal = re.fullmatch(r"-?\d+(?:\.(\d+))?", rounded.strip())
    if decimal is None or objection(exact) is not None:
        return False
    places = len(decimal[1] or "")
    try:
        value = closed_form(plain_spelling(exact))
        return bool(abs(value - Fraction(rounded)) * 2 * 10**places <= 1)
    except TooLargeError:
        return False
    except UnreadableError:
        return _ask("rounds_to", exact, rounded.strip(), places) is True


def _equal(one: str, other: str) -> bool:
    """Whether two sides of an equation have one value."""
    found = [_exact(side) for side in (one, other)]
    if found[0] is not None and found[1] is not None:
        return found[0] == found[1]
    return _ask("compare", one, other) == "equal"


def _exact(side: str) -> Fraction | None:
    quantity = read_quantity(side, any_unit=True)
    if quantity is not None:
        return quantity.value
    try:
        return closed_form(_without_unit(plain_spelling(side)))
    except (UnreadableError, TooLargeError):
        return None


def _ask(function: str, *arguments: object) -> object:
    """The sandbox's reply, None where it gives none: then the answer is not what it should be."""
    if any(isinstance(text, str) and objection(text) for text in arguments):
        return None
    try:
        return shared_sandbox(SYMBOLIC).call(function, *arguments)
    except CallFailedError:
        return None


def _symbolic(answer: str, gold: Reference, reference: str) -> Grade:
    sides = [_for_math_verify(side) for side in (reference, answer)]
    try:
        outcome, key = shared_sandbox(SYMBOLIC).call("judge", *sides)
    except CallFailedError as failure:
        return _unanswered(answer, sides[0], failure)
    if outcome == "reference unreadable":
        reason = f"math-verify cannot read the reference {reference[:SHOWN]}"
        return Grade(0.0, answer[:SHOWN], reason, failed=True)
    if outcome == "answer unreadable":
        return _wrong(answer, "the answer is no expression that math-verify reads")
    return _result(outcome == "equal", answer, gold, key)


def _unanswered(answer: str, reference: str, failure: CallFailedError) -> Grade:
    """Whose fault it is: where other comparisons come out in time, it is the answer's."""
    try:
        shared_sandbox(SYMBOLIC).call("works", reference)
    except CallFailedError:
        return Grade(0.0, answer[:SHOWN], f"math-verify failed: {failure}", failed=True)
    return _wrong(answer, f"the answer is beyond math-verify: {failure}")


def _wrong(answer: str, reason: str) -> Grade:
    return Grade(0.0, answer[:SHOWN], reason, key=text_key(answer[:SHOWN]))


def _result(right: bool, answer: str, gold: Reference, key: str | None = None) -> Grade:
    relation = "equal" if right else "not equal"
    named = text_key(gold.text) if right else key or text_key(answer[:LONGEST_ANSWER])
    if gold.quantity is not None and right:
        named = gold.key
    reason = f"{relation} to the reference {gold.text[:SHOWN]}"
    return Grade(float(right), answer[:SHOWN], reason, key=named[:SHOWN])


def _graded(right: bool, answer: str, gold: Reference, found: Quantity) -> Grade:
    assert gold.quantity is not None
    relation = "equal" if right else "not equal"
    key = gold.key if right else shared_value(found, gold.quantity)
    reason = f"{relation} to the reference {gold.text[:SHOWN]}"
    return Grade(float(right), answer[:SHOWN], reason, key=key[:SHOWN])


def _refused_word(answer: str) -> str | None:
    """A word in the answer that changes it; LaTeX commands are no words."""
    if not re.search("[A-Za-z]{2}", answer):
        return None
    plain = _COMMAND.sub(" ", plain_spelling(answer[:LONGEST_ANSWER]))
    return next(
        (word for word in words_of(plain) if word in REFUSED and word not in _FUNCTIONS), None
    )


def _has_variable(answer: str) -> bool:
    """Whether letters are left that are neither a unit, a function nor a constant."""
    plain = _COMMAND.sub(" ", _without_unit(plain_spelling(_TEXT.sub(_drop_unit, answer))))
    return any(word not in _FUNCTIONS for word in re.findall("[A-Za-z]+", plain))


_FUNCTIONS = {
    "e",
    "i",
    "pi",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "csc",
    "log",
    "ln",
    "exp",
    "oo",
    "mod",
}
"""Names that a formula without backslashes may have."""


def _without_unit(text: str) -> str:
    """`3 + 4 apples` to `3 + 4`."""
    match = _TRAILING_UNIT.fullmatch(text)
    if match is None or any(word in REFUSED for word in words_of(match[2])):
        return text
    words = words_of(match[2])
    unit = all(len(word) > 2 for word in words) and words[0] not in ("squared", "cubed")
    return match[1] if unit else text


@lru_cache(maxsize=4096)
def _for_math_verify(latex: str) -> str:
    """Undo what its reader gets wrong: `1 234` is read as a mixed number, 235."""
    quantity = read_quantity(latex)
    if quantity is None or quantity.unit or quantity.percent:
        return _TEXT.sub(_drop_unit, latex)
    return f"\\frac{{{quantity.value.numerator}}}{{{quantity.value.denominator}}}"


def _drop_unit(text: re.Match[str]) -> str:
    r"""Of `12\pi \text{ cm}^2` only the number is compared; a single letter is a variable."""
    return " " if re.search("[A-Za-z]{2}", text[1]) else text[0]


def _same_in_base(reference: str, answer: str) -> bool | None:
    """`52_8` is not `52_9`, which math-verify takes for equal; a base left out is understood."""
    gold = _BASED.fullmatch(_SPACES.sub("", reference))
    found = _BASED.fullmatch(_SPACES.sub("", answer[:100]))
    if gold is None:
        if found is None:
            return False if re.search(r"\d\s*_", answer) and read_quantity(reference) else None
        return _value_in_base(found, reference)
    if found is None:
        return gold[1] == plain_spelling(answer)
    return (gold[2] or gold[3]) == (found[2] or found[3]) and gold[1] == found[1]


def _value_in_base(found: re.Match[str], reference: str) -> bool | None:
    r"""`1001000_2` is 72; a variable with an index (`x_2`) is no number with a base."""
    base = int((found[2] or found[3])[:4])
    gold = read_quantity(reference)
    if gold is None or not found[1][0].isdigit():
        return None
    if not 2 <= base <= 36:
        return False
    try:
        return gold.value == int(found[1], base)
    except ValueError:
        return False
