r"""Arithmetic on plain numbers, read and worked out exactly, within bounds.

    sum     = [sign] product {("+" | "-") product}
    product = power {("*" | "/" | nothing, before a bracket) power}
    power   = atom {"!"} ["^" ([sign] atom | "{" sum "}")]
    atom    = number | "(" sum ")" | "{" sum "}"
            | "\frac" atom atom | "\binom" atom atom | "\sqrt" atom

Whatever is not a sentence of this grammar is left to math-verify.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

LARGEST_BITS = 20_000
"""Of a numerator or denominator: 6,000 digits."""
LARGEST_FACTORIAL = 1_000
LONGEST_SUM = 400
"""Characters."""
DEEPEST_SUM = 15

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3}){1,20}(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<sign>\\(?:cdot|times|div|frac|sqrt|binom)(?![A-Za-z])|\*\*|[-+*/^!(){}\u00d7\u00f7\u00b7]))"
)
_SAME = {
    "**": "^",
    "\\cdot": "*",
    "\\times": "*",
    "\u00d7": "*",
    "\u00b7": "*",
    "\\div": "/",
    "\u00f7": "/",
}


class UnreadableError(ValueError):
    """The text is no arithmetic on plain numbers."""


class TooLargeError(ValueError):
    """The value is beyond any answer."""


def closed_form(text: str) -> Fraction:
    r"""The value of arithmetic on plain numbers.

    >>> closed_form(r"48 + \frac{48}{2}"), closed_form("5!"), closed_form("2^{10} - 1")
    (Fraction(72, 1), Fraction(120, 1), Fraction(1023, 1))
    >>> closed_form("2x")
    Traceback (most recent call last):
    ...
    asymgrpo.tasks.closed_form.UnreadableError: 2x
    """
    if len(text) > LONGEST_SUM:
        raise UnreadableError(text[:40])
    return _Reader(text).whole()


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise TooLargeError
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        self.place = self.depth = 0
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise UnreadableError(text)
            token = match["number"] or match["sign"]
            self.tokens.append(_SAME.get(token, token))
            at = match.end()

    def whole(self) -> Fraction:
        value = self._sum()
        if self.place != len(self.tokens):
            raise UnreadableError(self.text)
        return value

    def _next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _takes(self, *tokens: str) -> str:
        found = self._next()
        if found not in tokens:
            return ""
        self.place += 1
        return found

    def _sum(self) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST_SUM:
            raise UnreadableError(self.text)
        sign = -1 if self._takes("-", "+") == "-" else 1
        value = sign * self._product()
        while operator := self._takes("+", "-"):
            term = self._product()
            value = _bounded(value + term if operator == "+" else value - term)
        self.depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._power()
        while True:
            operator = self._takes("*", "/")
            if not operator and self._next() not in ("(", "\\frac", "\\sqrt", "\\binom"):
                return value
            sign = -1 if operator and self._takes("-") else 1
            factor = sign * self._power()
            if operator == "/" and not factor:
                raise UnreadableError(self.text)
            value = _bounded(value / factor if operator == "/" else value * factor)

    def _power(self) -> Fraction:
        value = self._atom()
        while self._takes("!"):
            value = _factorial(value, self.text)
        if not self._takes("^"):
            return value
        sign = -1 if self._takes("-") else 1
        return _raised(value, sign * self._power(), self.text)

    def _atom(self) -> Fraction:
        token = self._next()
        self.place += 1
        if token in ("(", "{"):
            value = self._sum()
            if not self._takes(")" if token == "(" else "}"):
                raise UnreadableError(self.text)
            return value
        if token in ("\\frac", "\\binom"):
            top, bottom = self._argument(), self._argument()
            return (
                _ratio(top, bottom, self.text)
                if token == "\\frac"
                else _choose(top, bottom, self.text)
            )
        if token == "\\sqrt":
            return _root(self._argument(), self.text)
        if not token or token[0] not in ".0123456789":
            raise UnreadableError(self.text)
        return Fraction(token.replace(",", ""))

    def _argument(self) -> Fraction:
        r"""`{sum}`, or one digit as in `\frac12`."""
        token = self._next()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.place : self.place + 1] = [token[0], token[1:]]
        if token in ("(", "-", "+"):
            raise UnreadableError(self.text)
        return self._atom()


def _ratio(top: Fraction, bottom: Fraction, text: str) -> Fraction:
    if not bottom:
        raise UnreadableError(text)
    return _bounded(top / bottom)


def _factorial(value: Fraction, text: str) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise UnreadableError(text)
    if value > LARGEST_FACTORIAL:
        raise TooLargeError
    return Fraction(math.factorial(int(value)))


def _choose(top: Fraction, bottom: Fraction, text: str) -> Fraction:
    if top.denominator != 1 or bottom.denominator != 1 or min(top, bottom) < 0:
        raise UnreadableError(text)
    if top > LARGEST_FACTORIAL:
        raise TooLargeError
    return Fraction(math.comb(int(top), int(bottom)))


def _raised(base: Fraction, exponent: Fraction, text: str) -> Fraction:
    if exponent.denominator != 1 or (not base and exponent <= 0):
        raise UnreadableError(text)
    size = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if abs(base) != 1 and base and size * abs(exponent) > LARGEST_BITS:
        raise TooLargeError
    if abs(exponent) > LARGEST_BITS:
        if abs(base) == 1 or not base:
            return base if int(exponent) % 2 or not base else Fraction(1)
        raise TooLargeError
    return _bounded(base ** int(exponent))


def _root(value: Fraction, text: str) -> Fraction:
    if value < 0:
        raise UnreadableError(text)
    roots = [math.isqrt(part) for part in (value.numerator, value.denominator)]
    if roots[0] ** 2 != value.numerator or roots[1] ** 2 != value.denominator:
        raise UnreadableError(text)
    return Fraction(*roots)
