"""Where a completion states its answer. The last statement counts, and it counts as a whole.

Every search here is one pass over the end of the text, so that no text takes long.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asymgrpo.tasks.quantities import read_quantity

LONGEST_TEXT = 100_000
"""Characters from the end of a completion in which an answer is looked for."""
LONGEST_CLAUSE = 1_000
"""Characters of a sentence that are read after `the answer is`."""

Kind = Literal["boxed", "marker", "sentence", "number", "formula"]


@dataclass(frozen=True)
class Statement:
    """An answer as the text gives it, where it starts, and how it was found."""

    text: str
    start: int
    kind: Kind


_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\[{}\\]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_MARKER = re.compile(r"####[ \t]*([^\n]*)")
_SENTENCE = re.compile(
    r"\banswer(?:(?:\s+to\s[^.\n:]{0,80}?)?(?:\*\*)?\s+(?:is|=)|(?:\*\*)?\s*[:=])"
    r"(?:\*\*)?\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_MATHS = re.compile(r"[\d$\\]")
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|\*|$)|\n")
_CURRENCY = r"(?:\\?[$€£¥₹])"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}%.])[-\u2212])?{_CURRENCY}?(?:(?<=[$€£¥₹])-)?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/\d+|\ \d+/\d+)?|(?<![\d.])\.\d+)"
    r"(?:\s(?:hundred|thousand|million|billion|trillion)\b)?"
    r"|(?:(?<![\w)\]}])-)?(?:\b\d+\s?)?\\[dt]?frac\{\d+\}\{\d+\}"
)
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|\$((?:[^$\\\n]|\\.)+)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_WORD = re.compile(r"\s?[A-Za-z\\^*°%]*")
_SECOND_NUMBER = re.compile(
    r"(?:\bor\b|\band\b|[,;|&]|(?<=\d)\s)\s*(?:\\?[$€£])?-?\d", re.IGNORECASE
)


def last_boxed(text: str) -> Statement | None:
    r"""The last box that is closed, without the boxes around it.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}, and \boxed{3").text
    '\\frac{1}{2}'
    """
    if "box" not in text:
        return None
    span: tuple[int, int, int] | None = None  # of the box, of its content, to its end
    open_braces: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        if match[1]:
            open_braces.append(match.span())
        elif match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening is None:
                continue
            start, content = opening
            end = match.start()
            if span is not None and start < span[0] and _only_wraps(text, content, span, end):
                span = (start, span[1], span[2])
            else:
                span = (start, content, end)
    found = None if span is None else Statement(text[span[1] : span[2]].strip(), span[0], "boxed")
    for bare in _BARE_BOX.finditer(text):
        if found is None or bare.start() > found.start:
            found = Statement(bare[1].rstrip(".,;"), bare.start(), "boxed")
    return found if found is not None and found.text else None


def _only_wraps(text: str, content: int, inner: tuple[int, int, int], end: int) -> bool:
    """Whether a box holds another box and nothing else."""
    return not text[content : inner[0]].strip() and not text[inner[2] + 1 : end].strip()


def stated_answer(text: str) -> Statement | None:
    r"""The last explicit statement: a box, `#### n`, or `the answer is n`.

    >>> stated_answer("The answer is 5. No, wait.\n#### 1,200").text
    '1,200'
    >>> stated_answer("so 3 + 4 = 7") is None
    True
    """
    text = text[-LONGEST_TEXT:]
    found = [last_boxed(text), _last_marker(text)]
    certain = [statement for statement in found if statement is not None]
    sentence = _last_sentence(text, only_maths=bool(certain))
    if sentence is not None:
        certain.append(sentence)
    return max(certain, key=lambda statement: statement.start, default=None)


def _last_marker(text: str) -> Statement | None:
    for match in _latest(_MARKER, text):
        if match[1].strip():
            return Statement(match[1].strip(), match.start(), "marker")
    return None


def _last_sentence(text: str, only_maths: bool) -> Statement | None:
    """`only_maths`: after a box, "so the answer is correct" takes nothing back."""
    for match in _latest(_SENTENCE, text):
        clause = text[match.end() : match.end() + LONGEST_CLAUSE]
        end = _SENTENCE_END.search(clause)
        clause = (clause[: end.start()] if end else clause).strip()
        if clause.strip(" *$:") and (_MATHS.search(clause) or not only_maths):
            return Statement(clause, match.start(), "sentence")
    return None


def _latest(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The last few matches, latest first."""
    return reversed(deque(pattern.finditer(text), maxlen=20))


def numeric_answer(text: str) -> Statement | None:
    """The last stated number, or else the last number of the text; None where there is none.

    >>> numeric_answer("She sells 9 eggs at $2, which makes $18 a day.").text
    '$18'
    >>> numeric_answer("The answer is 5 or 6").text
    '5 or 6'
    """
    text = text[-LONGEST_TEXT:]
    stated = stated_answer(text)
    if stated is not None and stated.kind == "boxed":
        return stated
    if stated is not None and re.search(r"\d", stated.text):
        return Statement(_number_of_clause(stated.text), stated.start, stated.kind)
    return _last_number(text)


def _last_number(text: str) -> Statement | None:
    """Looks at the end first: a match well inside it does not depend on what comes before."""
    for size in (200, LONGEST_TEXT):
        end = text[-size:]
        last = next(_latest(_NUMBER, end), None)
        if last is not None and (last.start() > 60 or len(end) == len(text)):
            return Statement(last[0], len(text) - len(end) + last.start(), "number")
    return None


def _number_of_clause(clause: str) -> str:
    """The one number of `18 dollars a day`; an ambiguous clause stays as it is, and is wrong."""
    if read_quantity(clause, any_unit=True):
        return clause
    result = clause.rpartition("=")[2].strip()
    if result and result != clause and read_quantity(result, any_unit=True):
        return result
    first = _NUMBER.search(clause)
    if first is None or _SECOND_NUMBER.search(clause):
        return clause
    with_unit = first[0] + _WORD.match(clause, first.end())[0]  # type: ignore[index]
    # "5 pi" and "5x" are not 5, while "5 apples for 3 people" are.
    return first[0] if read_quantity(with_unit, any_unit=True) else clause


def expression_answer(text: str) -> Statement | None:
    r"""The last stated expression, or else the last formula or number of the text.

    >>> expression_answer(r"Thus $x = 3$ and the area is $\frac{9}{2}$.").text
    '\\frac{9}{2}'
    """
    text = text[-LONGEST_TEXT:]
    stated = stated_answer(text)
    if stated is not None:
        return stated if stated.kind != "sentence" else _expression_of_sentence(text, stated)
    formula = next(_latest(_FORMULA, text), None)
    number = _last_number(text)
    if formula is not None and (number is None or formula.end() > number.start):
        return Statement(_inside(formula), formula.start(), "formula")
    return number


def _expression_of_sentence(text: str, sentence: Statement) -> Statement:
    """Its one formula, or all of it; after a box it must be a plain number to count at all."""
    formulas = [_inside(match) for match in _FORMULA.finditer(sentence.text)]
    answer = formulas[0] if len(formulas) == 1 else sentence.text
    boxed = last_boxed(text)
    if boxed is not None and read_quantity(answer) is None:
        return boxed
    return Statement(answer, sentence.start, "sentence")


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()
