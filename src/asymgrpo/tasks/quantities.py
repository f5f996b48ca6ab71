"""Plain numbers as people write them, read exactly: no float, no evaluation, no backtracking.

A quantity is a number with an optional currency, power of ten, scale word, percent sign and unit.
Whatever is not a quantity (`2k`, `3\\sqrt{2}`, `1,-2`) is left to the other readers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from asymgrpo.tasks.words import REFUSED, SCALES, words_of

LONGEST_NUMBER = 400
"""Characters; a longer one is no answer to any question here, and big integers cost time."""

_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _members in {
    "money": {"$ dollar dollars usd buck bucks": "1", "cent cents": "1/100"},
    "euro": {"€ euro euros eur": "1"},
    "pound": {"£ gbp": "1"},
    "yen": {"¥ yen": "1"},
    "rupee": {"₹ rupee rupees": "1"},
    "length": {
        "mm millimeter millimeters": "1/1000",
        "cm centimeter centimeters centimetre centimetres": "1/100",
        "m meter meters metre metres": "1",
        "km kilometer kilometers kilometre kilometres": "1000",
        "inch inches": "127/5000",
        "ft foot feet": "381/1250",
        "yd yard yards": "1143/1250",
        "mi mile miles": "201168/125",
    },
    "time": {
        "s sec secs second seconds": "1",
        "min mins minute minutes": "60",
        "h hr hrs hour hours": "3600",
        "day days": "86400",
        "week weeks": "604800",
    },
    "mass": {
        "mg": "1/1000000",
        "g gram grams": "1/1000",
        "kg kilogram kilograms": "1",
        "oz ounce ounces": "45359237/1600000000",
        "lb lbs pound pounds": "45359237/100000000",
    },
    "volume": {"ml milliliter milliliters": "1/1000", "l liter liters litre litres": "1"},
    "angle": {"° degree degrees deg": "1"},
}.items():
    for _names, _factor in _members.items():
        _UNITS |= {name: (_dimension, Fraction(_factor)) for name in _names.split()}

_SHORT_WORDS = set(
    re.findall(r"\w+", "am pm tv tvs id ids kb mb gb tb hp kw hz ha cc dl of a an per")
)
"""Words of fewer than three letters that are no product of variables, beside the known units."""

_CURRENCY = "$€£¥₹"
_TEN = r"10\s*(?:\^|\*\*)\s*(?:\{{\s*[-+]?\d{{1,4}}\s*\}}|[-+]?\d{{1,4}})(?!\d)"
_NUMBER = rf"""
    (?P<sign>[-+])?\s*(?P<currency>[{_CURRENCY}])?\s*(?P<inner>[-+])?
    (?:
        (?:(?P<whole>\d+)\s+)?(?P<top>\d+)\s*/\s*(?P<bottom>\d+)
      | (?:(?P<lwhole>\d+)\s*)?\\frac\s*(?:\{{\s*(?P<ltop>-?\d+)\s*\}}|(?P<ltop1>\d))\s*
        (?:\{{\s*(?P<lbottom>\d+)\s*\}}|(?P<lbottom1>\d))
      | (?P<power>{_TEN.format()})
      | (?P<grouped>\d{{1,3}}(?:,\d{{3}})+(?![\d,])|\d{{1,3}}(?:\ \d{{3}})+(?!\d)|\d+)?
        (?P<decimals>\.\d*)?
        (?P<exponent>[eE][-+]?\d{{1,4}}(?![\d.A-Za-z])|\s*(?:\\times|\\cdot|[*x×·])\s*{_TEN.format()})?
    )
"""
_QUANTITY = re.compile(
    rf"{_NUMBER}(?P<tail>.*)", re.VERBOSE | re.DOTALL
)  # the tail is read by `_read_tail`
_SIMPLE = re.compile(r"-?\d{1,15}(?:\.(\d{1,15}))?")
_MINUS = re.compile(r"(?:minus|negative)\s+(?=[\d$.])", re.IGNORECASE)
_TAIL = re.compile(
    rf"(?P<scale>\s*(?i:{'|'.join(SCALES)})s?\b|[kKMB](?![A-Za-z]))?"
    r"(?P<percent>\s*(?:\\?%|(?i:percent(?:age)?)\b))?"
    rf"(?:\s*(?P<currency>[{_CURRENCY}]))?"
    r"(?P<units>.*)",
    re.DOTALL,
)
# A word is taken whole and blanks all at once: to try every way to split them takes for ever.
_UNIT_WORDS = re.compile(
    r"(?:(?P<joined>/|\bper\b|\ba\b|\ban\b|\bof\b)?\s*+(?:[A-Za-z]{1,30}+(?![A-Za-z])|°)\.?"
    r"(?:\s*+(?:\^\s*+)?\{?[23]\}?|[²³])?[\s-]*+){1,8}"
)
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"}
_PLAIN = (
    (re.compile(r"\{,\}|,\s*\\!\s*"), ","),
    (re.compile(r"\\(?:left|right|displaystyle|limits|!|,|;|:|>|quad|qquad)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|operatorname|textit)\s*\{([^{}]*)\}"),
     r" \1 "),
    (re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), "°"),
    (re.compile(r"\\(?:degree|textdegree)(?![A-Za-z])"), "°"),
    (re.compile(r"\\(?:[ ]|space(?![A-Za-z]))|~|[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\([$%#&_€£])"), r"\1"),
    (re.compile("[\u2212\u2013\u2012]"), "-"),
)  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """One number, exactly, and how it was written."""

    value: Fraction
    places: int | None = None
    """Digits after the decimal point, None for a fraction."""
    percent: bool = False
    unit: str | None = None
    """The unit as one of the known names, None if there was none or an unknown one."""
    power: int = 1
    """2 for square units, 3 for cubic ones."""


def plain_spelling(text: str) -> str:
    r"""One spelling for the many that LaTeX and typography have for the same characters.

    >>> plain_spelling(r"$\dfrac{1}{2}\text{ cm}$")
    '\\frac{1}{2} cm'
    """
    text = text.strip()
    for mark, spelled in _VULGAR.items():
        if mark in text:
            text = text.replace(mark, f" {spelled}")
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*`_ ").rstrip(".,;:").strip("*`_ ")
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        wrapped = len(text) > len(opening + closing) and text.endswith(closing)
        if wrapped and text.startswith(opening):
            text = text[len(opening) : -len(closing)]
    return " ".join(text.split())


@lru_cache(maxsize=4096)
def read_quantity(text: str, any_unit: bool = False) -> Quantity | None:
    r"""The quantity that `text` as a whole is, or None.

    `any_unit` takes any word for a unit (`18 eggs`); otherwise it must be a known one.

    >>> read_quantity("$1,250.50").value
    Fraction(2501, 2)
    >>> read_quantity(r"1\frac{4}{5}").value, read_quantity("-3/4").value
    (Fraction(9, 5), Fraction(-3, 4))
    >>> read_quantity("2 million people", any_unit=True).value
    Fraction(2000000, 1)
    >>> read_quantity("5x") is read_quantity("1,2") is read_quantity("1 or 2", True) is None
    True
    """
    if not 0 < len(text) <= LONGEST_NUMBER:
        return None
    simple = _SIMPLE.fullmatch(text)
    if simple is not None:
        return Quantity(Fraction(text), len(simple[1] or ""))
    plain = plain_spelling(text)
    negated = _MINUS.match(plain)
    plain = plain[negated.end() :] if negated else plain
    if plain.startswith("(") and plain.endswith(")") and "(" not in plain[1:]:
        plain = plain[1:-1].strip()
    match = _QUANTITY.fullmatch(plain)
    number = match and _value(match)
    if match is None or number is None:
        return None
    value, places = number
    tail = _TAIL.fullmatch(match["tail"])
    assert tail is not None  # every part of it is optional
    unit = _read_units(tail["units"], any_unit)
    if unit is None:
        return None
    name, power = unit
    currency = match["currency"] or tail["currency"]
    value *= _scale(tail["scale"]) * (-1 if negated else 1)
    return Quantity(value, places, bool(tail["percent"]), currency or name, power)


def _scale(word: str | None) -> int:
    word = (word or "").strip()
    return {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}.get(word) or SCALES[
        word.lower().rstrip("s")
    ]


def _value(match: re.Match[str]) -> tuple[Fraction, int | None] | None:
    sign = -1 if (match["sign"] == "-") != (match["inner"] == "-") else 1
    top = match["top"] or match["ltop"] or match["ltop1"]
    if top is not None:
        bottom = int(match["bottom"] or match["lbottom"] or match["lbottom1"])
        whole = int(match["whole"] or match["lwhole"] or 0)
        return (sign * (whole + Fraction(int(top), bottom)), None) if bottom else None
    if match["power"]:
        return sign * _power_of_ten(match["power"]), None
    digits = (match["grouped"] or "").replace(",", "").replace(" ", "")
    decimals = (match["decimals"] or "").removeprefix(".")
    if not digits and not decimals:
        return None
    value = sign * Fraction(int(digits + decimals), 10 ** len(decimals))
    if not match["exponent"]:
        return value, len(decimals)
    return value * _power_of_ten(match["exponent"]), None


def _power_of_ten(text: str) -> Fraction:
    """Of `e5`, `10^5` or `\\times 10^{5}`."""
    exponent = int(re.split(r"[eE^]|\*\*", text)[-1].strip("{} \t"))
    return Fraction(10) ** exponent


def _read_units(text: str, any_unit: bool) -> tuple[str | None, int] | None:
    """The known unit in `text` and its power; None where `text` is no unit at all."""
    spaced = text[:1].isspace() or text[:1] == "("
    text = text.strip().strip("()").strip()
    if not text:
        return None, 1
    if not _UNIT_WORDS.fullmatch(text):
        return None
    words = words_of(text) + ["°"] * text.count("°")
    if any(word in REFUSED for word in words) or words[0] in ("squared", "cubed"):
        return None
    known = [word for word in words if word in _UNITS]
    short = [word for word in words if len(word) < 3 and word not in _UNITS]
    if (not known and not any_unit) or set(short) - _SHORT_WORDS:
        return None
    if not known and not spaced and text[0].isalpha():
        return None  # `5apples` is no number, `5 apples` and `5cm` are
    power = 3 if re.search("3|³|cubic|cubed", text) else 1
    power = 2 if re.search("2|²|square", text) else power
    # A compound unit (miles per hour) is not converted: only its number is compared.
    return (known[0] if len(known) == 1 and "/" not in text else None), power


def same_quantity(one: Quantity, other: Quantity) -> bool:
    """Equal in value; units count where both are known, percent where either is written.

    >>> same_quantity(read_quantity("1/3"), read_quantity("0.333333"))
    True
    >>> same_quantity(read_quantity("5.4 cents"), read_quantity("$5.40"))
    False
    >>> same_quantity(read_quantity("25%"), read_quantity("0.25"))
    True
    """
    left, right = one.value, other.value
    if one.unit and other.unit:
        (kind, factor), (other_kind, other_factor) = _UNITS[one.unit], _UNITS[other.unit]
        if kind != other_kind or one.power != other.power:
            return False
        left, right = left * factor**one.power, right * other_factor**other.power
    if left == right:
        return True
    if one.percent != other.percent:
        return left == right / 100 if other.percent else left / 100 == right
    return _rounds_to(one, other.value) or _rounds_to(other, one.value)


def _rounds_to(written: Quantity, exact: Fraction) -> bool:
    """Whether a decimal of six places or more is `exact`, a fraction without end, rounded."""
    places = written.places
    if places is None or places < 6 or _terminates(exact):
        return False
    return written.value == round(exact, places)


def _terminates(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


def shared_value(quantity: Quantity, beside: Quantity) -> str:
    """A name for the value: equal for all spellings of it, in the unit of `beside` if it has one.

    >>> shared_value(read_quantity("1,200.0"), read_quantity("7"))
    '1200'
    >>> cents, dollars = read_quantity("250 cents"), read_quantity("$1")
    >>> shared_value(cents, dollars) == shared_value(read_quantity("$2.50"), dollars)
    True
    """
    value = quantity.value
    if quantity.unit and beside.unit:
        value *= _UNITS[quantity.unit][1] ** quantity.power
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 1_000:
        return f"{value.numerator % (1 << 61)} of {value.denominator % (1 << 61)}"
    return f"{value}%" if quantity.percent and not beside.percent else str(value)
