r"""What kind of thing a reference answer is, which decides how answers to it are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from asymgrpo.tasks.quantities import Quantity, plain_spelling, read_quantity, shared_value

ReferenceKind = Literal["choice", "number", "words", "expression"]

_CHOICE = re.compile(r"([A-J])|\(([A-Ja-j])\)")
_NAMED = re.compile(r"\s*([A-Za-z](?:_\{?\w\}?)?)\s*=(.+)", re.DOTALL)
_REMARK = re.compile(r"(.*\d.*?)\s*\([^()\d]*\)\s*", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ .'-]+[A-Za-z]+)*")
_LAYOUT = re.compile(r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr)(?![A-Za-z])|\\[,;:! ]|\s")


@dataclass(frozen=True)
class Reference:
    """A reference answer, read."""

    text: str
    kind: ReferenceKind
    quantity: Quantity | None = None
    """The number, where it is one."""
    name: str | None = None
    """`x` where the reference is `x = 5`."""
    key: str = ""
    """What equal answers are called, if it is a number."""

    @property
    def has_relation(self) -> bool:
        return bool(RELATION.search(self.text))


RELATION = re.compile(r"(?<![<>!:])=|[<>\u2264\u2265]|\\(?:in|leq?|geq?|lt|gt|neq?)(?![A-Za-z])")


@lru_cache(maxsize=65_536)
def read_reference(text: str) -> Reference:
    r"""The kind and the value of a reference.

    >>> read_reference(r"\text{(C)}").kind, read_reference("80 (raisins)").quantity.value
    ('choice', Fraction(80, 1))
    >>> read_reference("x=5").name, read_reference("even").kind, read_reference("2k+2").kind
    ('x', 'words', 'expression')
    """
    if len(text) > 2_000:
        return Reference(text, "expression")
    plain = plain_spelling(text)
    choice = _CHOICE.fullmatch(plain)
    if choice is not None:
        return Reference((choice[1] or choice[2]).upper(), "choice")
    quantity = _number(text)
    if quantity is not None:
        return Reference(text, "number", quantity, key=shared_value(quantity, quantity))
    named = _NAMED.fullmatch(plain)
    if named is not None and (quantity := _number(named[2])) is not None:
        key = shared_value(quantity, quantity)
        return Reference(text, "number", quantity, named[1], key)
    if _WORDS.fullmatch(plain) and "\\" not in plain and len(plain) > 2:
        return Reference(text, "words")
    if text.strip().startswith("\\text") and re.search("[A-Za-z]{2}", plain):
        return Reference(text, "words")
    return Reference(text, "expression")


def _number(text: str) -> Quantity | None:
    found = read_quantity(text, any_unit=True)
    if found is None:
        remark = _REMARK.fullmatch(text)
        found = read_quantity(remark[1], any_unit=True) if remark else None
    return found


def text_key(text: str) -> str:
    r"""A spelling in which `\text{(C)}`, `(C)` and `C`, or `\dfrac12` and `\frac{1}{2}` are one.

    >>> text_key(r"\text{Evelyn}"), text_key(r"\dfrac12") == text_key(r"\frac{1}{2}")
    ('evelyn', True)
    """
    text = _LAYOUT.sub("", plain_spelling(text)) if len(text) <= 2_000 else text
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    letter = re.fullmatch(r"\(?([A-Za-z])\)?", text)
    if letter is not None:
        return letter[1]
    return text.casefold() if text.isalpha() and len(text) > 1 else text


_OPTION = re.compile(
    r"(?:the\s+)?(?:(?:correct|right|final)\s+)?(?:(?:option|choice|answer|letter)\b[\s:]*(?:is\b[\s:]*)?)?"
    r"(?:\(([A-Ja-j])\)|([A-J])(?![A-Za-z'0-9+*/^_=<>(]))(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_OPTION = re.compile(
    r"\([A-Ja-j]\)|(?<![A-Za-z])[B-HJ](?![A-Za-z'])|(?<![A-Za-z])[AI]\s*(?:$|[).:,;])"
)
_TAKES_BACK = re.compile(
    r"\b(?:or|not|isn't|maybe|perhaps|possibly|probably|wrong|incorrect|false|nor|neither)\b",
    re.IGNORECASE,
)
_OPTION_LINE = 400
"""Characters of a line that are read for a choice."""


def read_choice(text: str) -> str | None:
    r"""The one letter that `text` chooses, or None.

    >>> read_choice("option C"), read_choice("C) 3"), read_choice("(c)"), read_choice("C or D")
    ('C', 'C', 'C', None)
    """
    plain = plain_spelling(text[:_OPTION_LINE]).replace("*", "").strip(" '\".")
    match = _OPTION.fullmatch(plain)
    if match is None:
        return None
    rest = match["rest"]
    if _OTHER_OPTION.search(rest) or _TAKES_BACK.search(rest) or re.match(r"\s*[-+*/^=]", rest):
        return None
    # A letter in a sentence of its own is an article or a name: only marks or reasons may follow.
    if (
        rest.strip()
        and not re.match(r"\s*[).:,;(-]|\s+(?:because|since|as|is|which)\b", rest)
        and not match[1]
    ):
        return None
    return str(match[1] or match[2]).upper()
