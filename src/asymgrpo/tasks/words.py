"""The closed lists of words that change, doubt or take back the number beside them.

Every other word is a unit, a name or an explanation. `docs/grading.md` prints these lists; a test
holds the two together.
"""

from __future__ import annotations

import re


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


NEGATIONS = _set(
    "not no never neither nor none cannot without except isn't isnt aren't wasn't weren't can't "
    "won't don't doesn't didn't"
)
HEDGES = _set(
    "or maybe perhaps possibly probably likely either might may could unsure uncertain "
    "alternatively otherwise versus vs"
)
BOUNDS = _set(
    "than least most below above under beyond between through exceeds exceeding within until to"
)
OPERATIONS = _set(
    "plus minus over divided multiplied half halves third thirds fourths fifths sixths sevenths "
    "eighths ninths tenth tenths hundredths thousandths twice thrice double triple "
    "factorial root sqrt point modulo mod pi sin cos tan cot csc log ln exp infinity infty oo "
    "negative out gross and"
)
NUMBER_WORDS = _set(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
RETRACTIONS = _set(
    "wrong incorrect false mistaken mistake error invalid untrue nonsense unknown undetermined"
)
SCALES = {"dozen": 12, "hundred": 100} | {
    name: 1_000**power
    for power, name in enumerate(("thousand", "million", "billion", "trillion"), 1)
}
"""Words that multiply the number before them."""
REASONS = _set(
    "because since as for which so when given where by from in at on with if after before during "
    "that who whose while altogether"
)
"""Words that begin an explanation, in which numbers are free."""
DOUBTS = _set("maybe perhaps possibly probably likely unsure uncertain alternatively doubt")
"""Words that leave an answer open wherever they stand in its sentence."""

REFUSED = (
    NEGATIONS | HEDGES | BOUNDS | OPERATIONS | NUMBER_WORDS | RETRACTIONS | frozenset(SCALES)
) | {f"{scale}s" for scale in SCALES}
"""Words that a unit, and what stands before a number, must not have."""
_WORD = re.compile(r"[A-Za-z]+(?:['\u2019][A-Za-z]+)?")


def words_of(text: str) -> list[str]:
    """The words of `text` in small letters.

    >>> words_of("It isn\u2019t 5 m/s")
    ['it', "isn't", 'm', 's']
    """
    return [word.lower().replace("\u2019", "'") for word in _WORD.findall(text)]
