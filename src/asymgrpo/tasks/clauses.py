r"""From the sentence of an answer to its value.

    clause = lead value [unit] [explanation]

The lead and the unit have no word that changes a number (`words.REFUSED`). An explanation begins
with a punctuation mark or a word such as `because`; it may have numbers of its own only after such
a word. A clause that is no sentence of this grammar is ambiguous, and ambiguous is wrong.
"""

from __future__ import annotations

import re

from asymgrpo.tasks.quantities import read_quantity
from asymgrpo.tasks.words import DOUBTS, NUMBER_WORDS, REASONS, REFUSED, RETRACTIONS, words_of

_FORMULA = re.compile(
    r"\$\$([^$]{1,900})\$\$|\$((?:[^$\\\n]|\\.){1,900})\$(?!\d)|\\\(((?:[^\\\n]|\\(?!\))){1,900})\\\)"
    r"|\\\[((?:[^\\]|\\(?!\])){1,900})\\\]"
)
_START = re.compile(r"[-+\u2212]?\s?(?:\\?[$€£¥₹]\s?)?[-\u2212]?[.(]?\d|\\[A-Za-z(\[]|\$")
_EXPLANATION = re.compile(
    rf"[,;:](?=\s|$)|\s[-\u2013\u2014]+\s(?=[A-Za-z])|\s\((?=\s*[A-Za-z\d])|\s(?={'|'.join(REASONS)})"
    rf"(?:{'|'.join(REASONS)})\b",
    re.IGNORECASE,
)
_REASON = re.compile(rf"\W*(?:{'|'.join(REASONS)}|not)\b", re.IGNORECASE)
_OR_NUMBER = re.compile(r"\b(?:or|versus|vs)\b[^.]*?\d", re.IGNORECASE)
_NOT_RIGHT = re.compile(
    r"\b(?:not|isn['\u2019]t|never|hardly)\s+(?:the\s+|my\s+|quite\s+)?"
    r"(?:right|correct|true|sure|certain|answer|it)\b",
    re.IGNORECASE,
)
_REASON_WORD = re.compile(r"[,;]?\s(?:because|since|as|which|so|when|given|where)\b", re.IGNORECASE)
_LISTED = re.compile(r"\s*(?:,|,?\s*and)\s*")
_MINUS = re.compile(r"\b(?:minus|negative)\s*$", re.IGNORECASE)
_EMPHASIS = re.compile(r"\*\*|__|`")


class AmbiguousError(ValueError):
    """The clause does not state one value."""


def value_of_clause(clause: str) -> str:
    """The value of a clause with its unit, as written; `AmbiguousError` where it has not just one.

    >>> value_of_clause("28 apples in total"), value_of_clause("that she sold 42 clips")
    ('28 apples', '42 clips')
    >>> value_of_clause("72, maybe 73")
    Traceback (most recent call last):
    ...
    asymgrpo.tasks.clauses.AmbiguousError: a second answer, or doubt, after the first
    """
    clause = _EMPHASIS.sub("", clause).strip("'\" ")
    if read_quantity(clause, any_unit=True):
        return clause
    start = _START.search(clause)
    if start is None:
        return _without_explanation(clause)
    lead, rest = clause[: start.start()], clause[start.start() :].lstrip()
    negative = _MINUS.search(lead)
    lead = lead[: negative.start()] if negative else lead
    _check_lead(lead)
    value, tail = _split(rest)
    _check_explanation(tail)
    return f"-{value}" if negative else value


def _split(rest: str) -> tuple[str, str]:
    """The value, and what is said after it."""
    formula = _FORMULA.match(rest)
    if formula is not None:
        inside = next(group for group in formula.groups() if group is not None).strip()
        return inside, rest[formula.end() :]
    depth = 0
    marks = {match.start() for match in _EXPLANATION.finditer(rest)}
    for place, character in enumerate(rest):
        depth += (character in "([{") - (character in ")]}")
        opens = character == "(" or rest[place : place + 2] == " ("
        if place in marks and depth <= (1 if opens and character == "(" else 0):
            return rest[:place].strip(), rest[place:]
    return rest.strip(), ""


def _without_explanation(clause: str) -> str:
    """An answer in words: the clause up to its reason."""
    words = set(words_of(clause))
    if words & (DOUBTS | RETRACTIONS):
        raise AmbiguousError("doubt, or a retraction")
    reason = _EXPLANATION.search(clause)
    return clause[: reason.start()].strip() if reason and reason.start() else clause


def _check_lead(lead: str) -> None:
    refused = [word for word in words_of(lead) if word in REFUSED or word in DOUBTS]
    if refused:
        raise AmbiguousError(f"{refused[0]!r} before the number")


def _check_explanation(tail: str) -> None:
    words = words_of(tail)
    if any(word in DOUBTS or word in RETRACTIONS for word in words) or _NOT_RIGHT.search(tail):
        raise AmbiguousError("a second answer, or doubt, after the first")
    if _OR_NUMBER.search(tail):
        raise AmbiguousError("a second answer after the first")
    numbers = any(word in NUMBER_WORDS for word in words) or re.search(r"\d", tail)
    if numbers and not _REASON.match(tail):
        raise AmbiguousError("a second number after the first")
    first = words[0] if words else ""
    if first in REFUSED and first != "not":
        raise AmbiguousError(f"{first!r} after the number")


def expression_of_clause(clause: str) -> str:
    r"""The expression of a clause: its formula, its formulas as a list, or all before the reason.

    >>> expression_of_clause("$x^2$ because it grows"), expression_of_clause("$1$ and $-2$")
    ('x^2', '1, -2')
    >>> expression_of_clause("(3, 4)")
    '(3, 4)'
    """
    clause = _EMPHASIS.sub("", clause).strip(" '\"")
    formulas = list(_FORMULA.finditer(clause))
    if not formulas:
        reason = _REASON_WORD.search(clause)
        clause = clause[: reason.start()].strip() if reason and reason.start() else clause
        negated = set(words_of(clause)) & (DOUBTS | RETRACTIONS | {"not", "or", "isn't"})
        if negated:
            raise AmbiguousError(f"{min(negated)!r} in the answer")
        return clause
    _check_lead(clause[: formulas[0].start()])
    end = 1
    while end < len(formulas) and _LISTED.fullmatch(
        clause, formulas[end - 1].end(), formulas[end].start()
    ):
        end += 1
    _check_explanation(clause[formulas[end - 1].end() :])
    inside = [next(g for g in f.groups() if g is not None).strip() for f in formulas[:end]]
    return ", ".join(inside)
