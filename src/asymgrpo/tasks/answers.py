r"""Where a completion states its answer. The last statement counts, and it counts as a whole.

A statement is a box, a line after `####`, or a sentence `the answer is ...`. Every search here is
one pass over the end of the text, so that no text takes long. `docs/grading.md` states the rule.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from asymgrpo.tasks.words import (
    BOUNDS,
    DOUBTS,
    HEDGES,
    NEGATIONS,
    NUMBER_WORDS,
    OPERATIONS,
    REFUSED,
    RETRACTIONS,
    SCALES,
    words_of,
)

LONGEST_TEXT = 100_000
"""Characters from the end of a completion in which an answer is looked for."""
LONGEST_CLAUSE = 1_000
"""Characters of a sentence that are read after `the answer is`."""
CONTEXT = 80
"""Characters before and after a statement that are read for a negation or an alternative."""

Kind = Literal["boxed", "marker", "sentence", "number", "formula"]


@dataclass(frozen=True)
class Statement:
    """An answer as the text gives it, where it starts, and how it was found."""

    text: str
    start: int
    kind: Kind
    problem: str | None = None
    """Why it states no one answer, None if it does."""


_BRACES = re.compile(r"\\(?:boxed|fbox|framebox)\s*(\{)|\\[{}\\]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_JOINED = re.compile(r"[\s$,;&]*(?:\\text\s*\{\s*)?(?:\b(?:or|and)\b)?[\s},;&$]*")
_AFTER_BOX = re.compile(
    r"[\s$).\]\\]*(?:(?:is|was)\s+)?(?:(?:not|isn't|wrong|incorrect|false)\b"
    r"|(?:or|maybe|perhaps)\s+(?:\w+\s+){0,2}[$-]*\d)"
)
_SENTENCE = re.compile(
    r"\banswers?(?:\*\*)?(?:\s*[:=]|(?:\s+to\s[^.\n:]{0,80}?)?(?:\s+(?:is|was|equals|comes\s+to|"
    r"(?:would|will|must|should|has\s+to)\s+be|(?P<open>isn['\u2019]?t|wasn['\u2019]?t|"
    r"(?:can|cannot|can['\u2019]t|could|might|may)\s+be))\b|\s+=))(?:\*\*)?\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_ANSWER = re.compile("answer", re.IGNORECASE)
MOST_STATEMENTS = 20
"""Lines and sentences, from the end, that are looked at for one that says something."""
_MATHS = re.compile(r"[\d$\\]")
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|\*|$)|\n")
_CURRENCY = r"(?:\\?[$€£¥₹])"
_TEN = r"10(?:\^|\*\*)(?:\{[-+]?\d{1,4}\}|[-+]?\d{1,4})"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}%.])[-\u2212])?{_CURRENCY}?(?:(?<=[$€£¥₹])-)?"
    r"(?:(?<![A-Za-z_^\\\d.])(?<![_^]\{)(?<![_^]-)(?:\d{1,3}(?:,\d{3}){1,40}(?!\d)|\d+)"
    r"(?:/\d+|\ \d+/\d+"
    rf"|(?:\.\d+)?(?:[eE][-+]?\d{{1,4}}(?!\w)|\s?(?:\\times|\\cdot|[*x×·])\s?{_TEN})?)"
    r"|(?<![\w.])\.\d+)"
    rf"(?:\s(?:{'|'.join(SCALES)})s?\b)?"
    r"|(?:(?<![\w)\]}])-)?(?:\b\d+\s?)?\\[dt]?frac\{\d+\}\{\d+\}",
    re.IGNORECASE,
)
_OPEN_LEADS = NEGATIONS | DOUBTS | HEDGES | (BOUNDS - {"to", "within"})
_WORKED_ON = OPERATIONS - {"and"}
_CHANGING = REFUSED - {"and"}
_DENYING = NEGATIONS | DOUBTS
_PART = re.compile(r"[^,;:(]*")
# Letters joined to a number are a unit of at most four; a power or a base makes another number.
_MORE = re.compile(r"[A-Za-z]{5}|\s?(?:\^|\*\*)|[_!]\d|(?:st|nd|rd|th)\b")
_DIGIT = re.compile("[0-9]")
LONGEST_NUMERAL = 60
"""Characters before the last digit of a text in which its last number is first looked for."""
_LEADING_JOIN = re.compile(
    r"(?:\d[%)}]?|\bof)\s*(?:\b(?:or|and|to|through|plus|minus|times|over)\b|[-\u2013+*/^\u00d7\u00f7])"
    r"\s*\\?[$€£]?$",
    re.IGNORECASE,
)
_MINUS = re.compile(r"\b(?:minus|negative)\s+$", re.IGNORECASE)
_DELIMITER = re.compile(r"\\.|\$\$|\$", re.DOTALL)


def last_boxed(text: str) -> Statement | None:
    r"""The last box that is closed, without the boxes around it.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}, and \boxed{3").text
    '\\frac{1}{2}'
    """
    if "box" not in text:
        return None
    spans = _closed_boxes(text)
    for bare in _BARE_BOX.finditer(text):
        if not spans or spans[-1][0] < bare.start():
            end = bare.start(1) + len(bare[1].rstrip(".,;"))
            spans.append((bare.start(), bare.start(1), end))
    if not spans:
        return None
    start, content, end = spans[-1]
    inside = text[content:end].strip()
    # Boxes that only a comma or a word joins are one statement of several answers.
    while len(spans) > 1 and _joins(text[spans[-2][2] + 1 : spans[-1][0]]):
        spans.pop()
        start = spans[-1][0]
        inside = f"{text[spans[-1][1] : spans[-1][2]].strip()}, {inside}"
        if len(inside) > LONGEST_CLAUSE:
            break
    signed = text[max(0, start - 2) : start]
    if signed.endswith("-") and not re.match(r"[\w)}\]-]", signed):
        inside = f"-{inside}"
    return Statement(inside, start, "boxed", _box_problem(text, start, end, inside))


def open_box(text: str) -> Statement | None:
    """A box that is never closed: what would have stood in it is not known.

    >>> open_box(r"so \\boxed{72").problem
    'the box is not closed'
    """
    if "box" not in text:
        return None
    box = next(_latest(_BOX, text[-LONGEST_TEXT:]), None)
    if box is None:
        return None
    start = box.start() + max(0, len(text) - LONGEST_TEXT)
    return Statement(text[start : start + CONTEXT], start, "boxed", "the box is not closed")


def _joins(between: str) -> bool:
    return len(between) <= CONTEXT and _JOINED.fullmatch(between) is not None


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """(start, start of the content, its end) of every closed box that is in no other."""
    spans: list[tuple[int, int, int]] = []
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
            (start, content), end = opening, match.start()
            inner = spans[-1] if spans and spans[-1][0] > start else None
            if inner and _only_wraps(text, content, inner, end):
                content, end = inner[1], inner[2]
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, content, end))
    return spans


def _only_wraps(text: str, content: int, inner: tuple[int, int, int], end: int) -> bool:
    """Whether a box holds another box and nothing else."""
    before, after = text[content : inner[0]][:40], text[inner[2] : end][:40]
    return not before.strip() and not after.strip("} \n\t")


def _box_problem(text: str, start: int, end: int, inside: str) -> str | None:
    if not inside:
        return "the box is empty"
    if _BOX.search(inside[:LONGEST_CLAUSE]):
        return "a box within a box, with more around it"
    if _words_before(text, start, 3) & NEGATIONS:
        return "the box is negated"
    if _AFTER_BOX.match(text[end + 1 : end + 1 + CONTEXT]):
        return "what follows the box takes it back"
    return None


def _words_before(text: str, start: int, count: int) -> set[str]:
    """The last words before `start` in the same part of the sentence."""
    return set(_last_words(text[max(0, start - CONTEXT) : start], count))


def _last_words(before: str, count: int) -> list[str]:
    begin = max(before.rfind(mark) for mark in ".!?:;,\n=")
    words = before[begin + 1 :].lower().split()[-count:]
    return [word.strip('*_$\\({["').replace("\u2019", "'") for word in words]


def stated_answer(text: str, wordy: bool = True) -> Statement | None:
    r"""The last explicit statement: a box, `#### n`, or `the answer is n`.

    `wordy`: whether a line or a sentence without mathematics states an answer.

    >>> stated_answer("The answer is 5. No, wait.\n#### 1,200").text
    '1,200'
    >>> stated_answer("so 3 + 4 = 7") is None
    True
    """
    text = text[-LONGEST_TEXT:]
    found = [last_boxed(text), _last_marker(text, wordy)]
    certain = [statement for statement in found if statement is not None]
    sentence = _last_sentence(text, wordy and not certain)
    if sentence is not None:
        certain.append(sentence)
    return max(certain, key=lambda statement: statement.start, default=None)


def _last_marker(text: str, wordy: bool) -> Statement | None:
    end = len(text)
    for _ in range(MOST_STATEMENTS):
        mark = text.rfind("####", 0, end)
        if mark < 0:
            return None
        end = text.rfind("\n", 0, mark) + 1
        start = text.find("####", end)
        line = text[start + 4 : start + 5 + LONGEST_CLAUSE].partition("\n")[0].strip()
        if line and (wordy or _speaks_of_numbers(line)):
            problem = "several statements on one line" if "####" in line else None
            return Statement(line, start, "marker", problem)
    return None


def _last_sentence(text: str, wordy: bool) -> Statement | None:
    """Not `wordy`: after a box, "so the answer is correct" takes nothing back."""
    for start in _places_of_answer(text):
        match = _SENTENCE.match(text, start)
        if match is None:
            continue
        clause = text[match.end() : match.end() + LONGEST_CLAUSE]
        end = _SENTENCE_END.search(clause)
        clause = (clause[: end.start()] if end else clause).strip()
        if clause.strip(" *$:") and (wordy or _speaks_of_numbers(clause)):
            return Statement(clause, match.start(), "sentence", _sentence_problem(text, match))
    return None


def _places_of_answer(text: str) -> Iterator[int]:
    """Where the word `answer` stands, the last few, latest first."""
    if not text.isascii():  # small letters may then take another place
        yield from (match.start() for match in _latest(_ANSWER, text))
        return
    small, place = text.lower(), len(text)
    for _ in range(MOST_STATEMENTS):
        place = small.rfind("answer", 0, place)
        if place < 0:
            return
        yield place


def _speaks_of_numbers(clause: str) -> bool:
    """Digits, formulas and number words state a number, and a retraction takes one back."""
    if _MATHS.search(clause):
        return True
    words = words_of(clause[:200])
    return any(word in NUMBER_WORDS or word in RETRACTIONS for word in words) or (
        bool(words) and words[0] in NEGATIONS
    )


def _sentence_problem(text: str, match: re.Match[str]) -> str | None:
    if match["open"]:
        return "the sentence does not say that it is the answer"
    if _words_before(text, match.start(), 6) & (NEGATIONS | DOUBTS | {"or", "might", "could"}):
        return "the sentence is negated or left open"
    return None


def _latest(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The last few matches, latest first."""
    return reversed(deque(pattern.finditer(text), maxlen=MOST_STATEMENTS))


def last_number(text: str) -> Statement | None:
    """The last number of a text that states no answer; looks at the end first.

    >>> last_number("She sells 9 eggs at $2, which makes $18 a day.").text
    '$18'
    >>> last_number("It is 5 or 6.").problem
    'two numbers joined into one statement'
    """
    text = text[-LONGEST_TEXT:]
    digit = _last_digit(text)
    if digit is None:
        return None
    for size in (LONGEST_NUMERAL, LONGEST_TEXT):
        begin = max(0, digit - size)
        last = next(_latest(_NUMBER, text[begin : digit + 20]), None)
        # A match well inside does not depend on what comes before.
        if last is not None and (last.start() > LONGEST_NUMERAL // 2 or not begin):
            return _in_context(Statement(last[0], begin + last.start(), "number"), text)
    return None


def _last_digit(text: str) -> int | None:
    """Its place; looks at the end first."""
    for place in range(len(text) - 1, max(-1, len(text) - 1 - LONGEST_NUMERAL), -1):
        if text[place] in "0123456789":
            return place
    last = next(_latest(_DIGIT, text), None)
    return None if last is None else last.start()


def _in_context(found: Statement, text: str) -> Statement:
    """With what stands beside the number in its sentence."""
    end = found.start + len(found.text)
    before, after = text[max(0, found.start - CONTEXT) : found.start], text[end : end + CONTEXT]
    minus = _MINUS.search(before)
    text_of, start = found.text, found.start
    if minus is not None:
        text_of, start = f"-{text_of}", start - len(minus[0])
        before = before[: minus.start()]
    stop = _SENTENCE_END.search(after)
    after = after[: stop.start()] if stop else after
    return Statement(text_of, start, "number", _context_problem(before, after))


def _context_problem(before: str, after: str) -> str | None:
    if _LEADING_JOIN.search(before[-12:]):
        return "two numbers joined into one statement"
    leading = _last_words(before, 3)
    if not _OPEN_LEADS.isdisjoint(leading) or not _WORKED_ON.isdisjoint(leading[-2:]):
        return "the number is negated, bounded, worked on or left open"
    if not after:
        return None
    if _MORE.match(after):
        return "more than a number"
    words = words_of(after)
    near = words_of(_PART.match(after)[0])[:3]  # type: ignore[index]
    if near and (near[0] in _CHANGING or not _DENYING.isdisjoint(near)):
        return "words that change the number"
    return None if RETRACTIONS.isdisjoint(words) else "the number is taken back"


def last_formula(text: str) -> Statement | None:
    r"""The last formula between `$`, `$$`, `\(` or `\[`, in one pass.

    >>> last_formula(r"Thus $x = 3$ and the area is \(\frac{9}{2}\).").text
    '\\frac{9}{2}'
    """
    text = text[-LONGEST_TEXT:]
    opened: dict[str, int] = {}
    last: tuple[int, int, int] | None = None
    for match in _DELIMITER.finditer(text):
        mark = match[0]
        if mark in ("\\(", "\\["):
            opened[mark] = match.end()
        elif mark in ("\\)", "\\]"):
            begun = opened.pop("\\(" if mark == "\\)" else "\\[", None)
            if begun is not None and begun < match.start():
                last = (begun - 2, begun, match.start())
        elif mark in ("$", "$$"):
            begun = opened.pop(mark, None)
            if (
                begun is None
                or begun == match.start()
                or (mark == "$" and "\n" in text[begun : match.start()])
            ):
                opened[mark] = match.end()
            else:
                last = (begun - len(mark), begun, match.start())
    if last is None:
        return None
    start, content, end = last
    problem = "negated" if _words_before(text, start, 3) & NEGATIONS else None
    return Statement(text[content:end].strip(), start, "formula", problem)
