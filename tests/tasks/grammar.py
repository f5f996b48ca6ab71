r"""Completions that are right or wrong by construction, around any reference.

    completion = frame(value)        the frame states the value:      right iff the value is
               | denial(value)       the frame does not state it:     wrong
    value      = spelling(reference) one of its spellings:            right
               | change(reference)   another value, or several:       wrong

Labels follow from exact fractions and from which table a template stands in; nothing here imports
the library. `pairs(count, seed)` draws them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pair:
    """One completion beside one reference."""

    completion: str
    reference: str
    right: bool
    rule: str
    """Which templates made it."""
    grader: str
    unevaluated: bool = True
    """Whether the task lets arithmetic count that is not worked out."""


@dataclass(frozen=True)
class Value:
    """An answer's text, whether it is right, and where it can stand."""

    text: str
    right: bool
    rule: str
    plain: bool = True
    """A numeral with nothing beside it, so that any sentence can hold it."""
    latex: bool = False
    """LaTeX, which belongs into a box or a formula."""
    sum: bool = False
    """Arithmetic that is not worked out."""


@dataclass(frozen=True)
class Gold:
    """A reference and its value; `unit` is a unit in the reference."""

    text: str
    kind: str
    value: Fraction = Fraction(0)
    unit: str = ""


# -- references ---------------------------------------------------------------------------------


def decimal(value: Fraction) -> str:
    """A terminating fraction as a decimal, without an exponent."""
    if value.denominator == 1:
        return str(value.numerator)
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    digits = str(abs(int(value * 10**places))).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def golds(rng: random.Random) -> Gold:
    """One reference of a kind drawn evenly."""
    kind = rng.choice(
        ["integer"] * 3
        + ["negative", "large", "decimal", "fraction", "percent", "money", "e-notation"]
        + ["factorial", "units", "choice"]
    )
    whole = rng.randint(3, 999)
    if kind == "negative":
        return Gold(str(-whole), kind, Fraction(-whole))
    if kind == "large":
        whole = rng.randint(1_000, 99_999_999)
        return Gold(rng.choice([str(whole), f"{whole:,}"]), kind, Fraction(whole))
    if kind == "decimal":
        value = Fraction(rng.randint(101, 99_999) * 10 + rng.randint(1, 9), 10 ** rng.randint(2, 4))
        return Gold(decimal(value), kind, value)
    if kind == "fraction":
        value = Fraction(rng.randint(1, 99), rng.choice([3, 7, 9, 11, 13, 17]))
        if value.denominator == 1:
            value += Fraction(1, 3)
        top, bottom = value.numerator, value.denominator
        return Gold(rng.choice([f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}"]), kind, value)
    if kind == "percent":
        return Gold(rng.choice([f"{whole}%", f"{whole}\\%"]), kind, Fraction(whole))
    if kind == "money":
        value = Fraction(rng.randint(101, 99_999), 100)
        return Gold(
            rng.choice([f"${value.numerator / value.denominator:.2f}", f"\\${decimal(value)}"]),
            kind,
            value,
        )
    if kind == "e-notation":
        mantissa, power = Fraction(rng.randint(11, 99), 10), rng.choice([-9, -4, 5, 8, 33])
        return Gold(f"{decimal(mantissa)}e{power}", kind, mantissa * Fraction(10) ** power)
    if kind == "factorial":
        return Gold(str(math.factorial(rng.randint(4, 9))), kind, Fraction(0))
    if kind == "units":
        unit = rng.choice(["apples", "raisins", "km", "square feet", "times"])
        text = rng.choice([f"{whole} ({unit})", f"{whole} {unit}"])
        return Gold(text, kind, Fraction(whole), unit)
    if kind == "choice":
        letter = rng.choice("ABCDE")
        return Gold(rng.choice([letter, f"({letter})", f"\\text{{({letter})}}"]), kind)
    return Gold(str(whole), kind, Fraction(whole))


# -- values -------------------------------------------------------------------------------------


def numeral(value: Fraction) -> str:
    """The plainest spelling."""
    bottom = value.denominator
    while bottom % 2 == 0:
        bottom //= 2
    while bottom % 5 == 0:
        bottom //= 5
    if bottom == 1:
        return decimal(value)
    return f"{value.numerator}/{value.denominator}"


def spellings(gold: Gold) -> list[Value]:
    """Texts that are the reference."""
    value = gold.value
    plain = numeral(value)
    found = [Value(plain, True, "plain")]
    size, minus = abs(value), "-" if value < 0 else ""
    if "/" not in plain:
        found.append(
            Value(f"{plain}.0" if "." not in plain else f"{plain}0", True, "trailing zero")
        )
        if size < 10**15:
            whole, _, rest = plain.lstrip("-").partition(".")
            grouped = f"{int(whole):,}" + (f".{rest}" if rest else "")
            found.append(Value(minus + grouped, True, "separators"))
            found.append(
                Value(minus + grouped.replace(",", "{,}"), True, "LaTeX separators", latex=True)
            )
        exponent = len(str(int(size))) - 1 if size >= 1 else -1
        mantissa = decimal(value / Fraction(10) ** exponent)
        found.append(Value(f"{mantissa}e{exponent}", True, "e-notation"))
        found.append(Value(f"{mantissa}E{exponent:+d}", True, "e-notation"))
        found.append(
            Value(f"{mantissa} \\times 10^{{{exponent}}}", True, "power of ten", latex=True)
        )
        found.append(
            Value(f"{mantissa} \\cdot 10^{{{exponent}}}", True, "power of ten", latex=True)
        )
    top, bottom = value.numerator, value.denominator
    if size < 10**9:
        found.append(Value(f"{top * 2}/{bottom * 2}", True, "fraction"))
        found.append(
            Value(f"{minus}\\frac{{{abs(top) * 3}}}{{{bottom * 3}}}", True, "fraction", latex=True)
        )
        found.append(
            Value(f"{minus}\\dfrac{{{abs(top)}}}{{{bottom}}}", True, "fraction", latex=True)
        )
    if value < 0:
        found += [Value(f"minus {numeral(size)}", True, "minus", plain=False)]
        found += [Value(f"negative {numeral(size)}", True, "minus", plain=False)]
        found += [Value(f"\u2212{numeral(size)}", True, "minus sign", plain=False)]
    found += _units(gold, plain)
    if gold.kind in ("integer", "large"):
        part = int(value) // 3
        found.append(Value(f"{part} + {int(value) - part}", True, "sum", plain=False, sum=True))
        found.append(Value(f"{int(value) * 2} - {int(value)}", True, "sum", plain=False, sum=True))
        found.append(
            Value(f"2 \\cdot {decimal(value / 2)}", True, "sum", plain=False, latex=True, sum=True)
        )
        found.append(Value(f"{decimal(value / 2)} * 2", True, "sum", plain=False, sum=True))
        found.append(Value(f"\\textbf{{(0{plain})}}", True, "competition", plain=False, latex=True))
    return found


def _units(gold: Gold, plain: str) -> list[Value]:
    if gold.kind == "money":
        cents = decimal(gold.value * 100)
        texts = [f"${plain}", f"\\${plain}", f"{plain} dollars", f"{cents} cents", f"{plain} USD"]
        return [Value(text, True, "money", plain=False) for text in texts]
    if gold.kind == "percent":
        texts = [f"{plain}%", f"{plain}\\%", f"{plain} percent", decimal(gold.value / 100)]
        return [Value(text, True, "percent", plain=False) for text in texts]
    if gold.kind == "units":
        texts = [f"{plain} {gold.unit}", f"{plain}\\text{{ {gold.unit}}}"]
        return [Value(text, True, "unit", plain=False, latex="\\" in text) for text in texts]
    if gold.kind in ("integer", "decimal"):
        return [
            Value(f"{plain}\\text{{ {unit}}}", True, "unit", plain=False, latex=True)
            for unit in ("apples", "square feet", "miles per hour", "dollars")
        ] + [
            Value(f"{plain} {unit}", True, "unit", plain=False) for unit in ("pens", "kg", "hours")
        ]
    return []


def factorials(gold: Gold) -> list[Value]:
    """Of a reference that is n!: the factorial itself, and neighbours."""
    n = next(n for n in range(3, 12) if math.factorial(n) == int(gold.text))
    right = Value(f"{n}!", True, "factorial", plain=False, latex=True, sum=True)
    wrong = [f"{n + 1}!", f"{n}!!", f"{n}", f"{gold.text}!", f"({n}!)!", f"{n}! + 1"]
    return [right, right, right] + [
        Value(t, False, "factorial", plain=False, latex=True) for t in wrong
    ]


CHANGES = (
    # {a} is the right numeral, {w} another one; all are wrong for a of three or more.
    ("factorial", "{a}!", True),
    ("factorial", "({a})!", True),
    ("base", "{a}_2", True),
    ("scale", "{a} dozen", False),
    ("scale", "{a} hundred", False),
    ("scale", "{a} thousand", False),
    ("scale", "{a} million", False),
    ("fraction word", "{a} halves", False),
    ("fraction word", "{a} tenths", False),
    ("number words", "{a} point five", False),
    ("number words", "{a} and a half", False),
    ("operation", "{a} minus one", False),
    ("operation", "{a} plus two", False),
    ("operation", "{a} squared", False),
    ("operation", "{a} over two", False),
    ("operation", "{a}+5", False),
    ("operation", "{a} - 1", False),
    ("operation", "{a} * 5", False),
    ("operation", "{a} times 5", False),
    ("operation", "{a}^2", True),
    ("operation", "\\frac{{{a}}}{{2}}", True),
    ("operation", "\\sqrt{{{a}}}", True),
    ("variable", "{a}x", True),
    ("variable", "{a}\\pi", True),
    ("variable", "{a}k + 1", True),
    ("exponent", "{a}e5", False),
    ("exponent", "{a} \\times 10^{{3}}", True),
    ("list", "{a}, {w}", False),
    ("list", "\\{{{a}, {w}\\}}", True),
    ("list", "({a}, {w})", True),
    ("alternatives", "{a} or {w}", False),
    ("alternatives", "{a} \\text{{ or }} {w}", True),
    ("alternatives", "{a} and {w}", False),
    ("alternatives", "either {a} or {w}", False),
    ("range", "{a} to {w}", False),
    ("range", "from {a} to {w}", False),
    ("range", "between {a} and {w}", False),
    ("range", "[{a}, {w}]", True),
    ("range", "{a} \\pm 1", True),
    ("relation", "1={a}", True),
    ("relation", "{w} = {a}", True),
    ("relation", "{a} = {w}", True),
    ("relation", "{w} = 1 = {a}", True),
    ("relation", "x < {a}", True),
    ("relation", "x \\geq {a}", True),
    ("relation", "x \\neq {a}", True),
    ("relation", "{a} \\approx {w}", True),
    ("negation", "not {a}", False),
    ("negation", "\\text{{not }} {a}", True),
    ("bound", "more than {a}", False),
    ("bound", "less than {a}", False),
    ("bound", "at least {a}", False),
    ("bound", "at most {a}", False),
    ("hedge", "maybe {a}", False),
    ("hedge", "probably {a}", False),
    ("hedge", "{a}, maybe {w}", False),
    ("hedge", "{a} or so", False),
    ("hedge", "{a} \\text{{ or more}}", True),
    ("operation before", "twice {a}", False),
    ("operation before", "half of {a}", False),
    ("operation before", "one less than {a}", False),
    ("operation before", "the square root of {a}", False),
    ("retraction", "{a} \\text{{ is wrong}}", True),
    ("retraction", "{a}, which is wrong", False),
    ("retraction", "{a} (incorrect)", False),
    ("nested box", "{w} \\boxed{{{a}}}", True),
    ("nested box", "\\boxed{{{a}}} {w}", True),
    ("unreadable", "\\foo {a} @@ {a}", True),
)


def changes(gold: Gold, rng: random.Random) -> Value:
    """A text that is not the reference."""
    value = gold.value
    plain = numeral(value)
    other = value + rng.choice([1, 2, 10, -1])
    if rng.random() < 0.3:
        candidates = [other, -value, value * 10, value / 2, value + Fraction(1, 10)]
        return Value(numeral(rng.choice(candidates)), False, "other number")
    rule, template, latex = rng.choice(CHANGES)
    if "/" in plain and rule in ("base", "factorial", "exponent"):
        rule, template, latex = "other number", "{w}", False
    text = template.format(a=plain, w=numeral(other))
    return Value(text, False, rule, plain=False, latex=latex)


# -- frames -------------------------------------------------------------------------------------

BOXES = (
    "\\boxed{{{a}}}",
    "So we get $\\boxed{{{a}}}$.",
    "Therefore \\[ \\boxed{{ {a} }} \\] as required.",
    "\\fbox{{{a}}}",
    "\\boxed{{\\boxed{{{a}}}}}",
    "First \\boxed{{{w}}}. No, that was too quick: \\boxed{{{a}}}.",
    "The answer is {w}. Wait. \\boxed{{{a}}}",
    "#### {w}\n\\boxed{{{a}}}",
    "\\boxed{{{a}}} is the answer. The answer is correct.",
    "3 + 4 = 7, so \\boxed{{{a}}} and then \\boxed{{4",
)
LINES = (
    "#### {a}",
    "She has 3 + 4 = 7 of them.\n#### {a}",
    "#### {w}\n#### {a}\n",
    "\\boxed{{{w}}}\n#### {a}",
    "The answer is {a}.",
    "The final answer is: {a}.",
    "Answer: {a}",
    "**Answer:** {a}",
    "The answer is **{a}**.",
    "So the answer to the question is {a}.",
    "The answer would be {a}.",
    "The answer is {w}. No, the answer is {a}.",
    "We add 3 and 4.\n\nThe answer is {a}.\n",
    # Who speaks, and that it is an opinion, leaves one value stated.
    "I guess the answer is {a}.",
    "I think the answer is {a}.",
    "I believe that the answer is {a}.",
)
FORMULAS = (
    "The answer is ${a}$.",
    "The answer is \\({a}\\).",
    "The answer is $\\boxed{{{a}}}$.",
    "The answer is \\({a}\\) because $3 + 4 = 7$.",
)
SENTENCES = (
    # Around a plain numeral only.
    "The answer is {a} because 3 + 4 = 7.",
    "The answer is {a} apples in total.",
    "The answer is **{a}** apples.",
    "The answer is that she sold {a} clips.",
    "The answer is {a}, not {w}.",
    "The answer is {a} apples for 3 people.",
    "The answer is {a}, which is what was asked.",
    "The answer is {a}, since there are 12 months.",
    "The answer is approximately {a}.",
    "The answer is {a} (in dollars).",
    "The answer is x = {a}.",
    "\\boxed{{x = {a}}}",
    "\\boxed{{\\text{{Area}} = {a}}}",
    "\\boxed{{f(2) = {a}}}",
    "First 3 + 4 = 7, then the rest. That makes {a} in all.",
    "She pays {a} a day.",
)
DENIALS = (
    ("negation", "The answer is not {a}."),
    ("negation", "The answer isn't {a}."),
    ("negation", "The answer cannot be {a}."),
    ("negation", "I do not think the answer is {a}."),
    ("negation", "It is not true that the answer is {a}."),
    ("negation", "We see that it is not \\boxed{{{a}}}."),
    ("negation", "In the end it is not {a}."),
    ("hedge", "The answer might be {a}."),
    ("hedge", "The answer could be {a}."),
    ("hedge", "Maybe the answer is {a}."),
    ("hedge", "Perhaps {a}."),
    ("hedge", "Probably the answer is {a}."),
    ("hedge", "Possibly the answer is {a}."),
    ("hedge", "I guess maybe the answer is {a}."),
    ("hedge", "I guess the answer might be {a}."),
    ("hedge", "I think the answer is probably {a}."),
    ("hedge", "I guess the answer is {a}, maybe {w}."),
    ("negation", "I don't believe the answer is {a}."),
    ("hedge", "The answer is {a}, maybe {w}."),
    ("alternatives", "The answer is {a} or {w}."),
    ("alternatives", "The answer is {w} or {a}."),
    ("alternatives", "\\boxed{{{a}}} or \\boxed{{{w}}}"),
    ("alternatives", "\\boxed{{{w}}} or \\boxed{{{a}}}"),
    ("alternatives", "\\boxed{{{a}}} or {w}"),
    ("alternatives", "It is {w} or {a}."),
    ("range", "It is {w} to {a}."),
    ("range", "The answer is from {w} to {a}."),
    ("bound", "It is more than {a}."),
    ("bound", "The answer is at least {a}."),
    ("several", "The answer is {a}. The answer is {w}."),
    ("several", "\\boxed{{{a}}} and then \\boxed{{{w}}}"),
    ("several", "#### {a}\n#### {w}"),
    ("several", "#### {a} #### {w}"),
    ("several", "#### {w} #### {a}"),
    ("several", "\\boxed{{{a}}}\nThe answer is {w}."),
    ("several", "The answer is {a}, {w}."),
    ("several", "The answer is {a} but really {w}."),
    ("several", "The answer is {a} (or {w})."),
    ("several", "The answer is {a}; {w} is close."),
    ("empty box", "We found {a}. \\boxed{{}}"),
    ("empty box", "The answer is {a}. \\boxed{{ }}"),
    ("open box", "So \\boxed{{{a}"),
    ("retraction", "\\boxed{{{a}}} is wrong."),
    ("retraction", "The answer is {a}, which is wrong."),
    ("retraction", "The answer is {a}, which is not correct."),
    ("retraction", "\\boxed{{{a}}}. The answer is wrong."),
    ("text after", "The answer is {a} dozen."),
    ("text after", "The answer is {a} halves."),
    ("text after", "The answer is {a} point five."),
    ("text after", "The answer is {a} minus one."),
    ("text after", "The answer is {a}th."),
    ("text after", "That makes {a} dozen."),
    ("text after", "That makes {a} point five."),
    ("text before", "The answer is twice {a}."),
    ("text before", "The answer is half of {a}."),
    ("text before", "The answer is one more than {a}."),
    ("no answer", "I do not know."),
    ("no answer", "\\boxed{{x}}"),
)
CHOICE_FRAMES = (
    "{c}",
    "({c})",
    "**{c}**",
    "option {c}",
    "The answer is {c}.",
    "The answer is ({c}).",
    "The answer is option {c}.",
    "The answer is {c}) 3",
    "The answer is {c} because 3 + 4 = 7.",
    "The correct answer is: {c}",
    "Answer: {c}",
    "\\boxed{{{c}}}",
    "\\boxed{{\\text{{({c})}}}}",
    "\\boxed{{\\textbf{{({c})}}}}",
    "\\boxed{{({c})\\ 3}}",
    "#### {c}",
    "We weigh each of them.\n\n({c})",
    "The answer is {d}. No, the answer is {c}.",
    "I guess the answer is {c}.",
    "I think the answer is {c}.",
)
CHOICE_DENIALS = (
    "The answer is not {c}.",
    "The answer is {c} or {d}.",
    "\\boxed{{{c}, {d}}}",
    "\\boxed{{{c}{d}}}",
    "\\boxed{{{c} \\text{{ or }} {d}}}",
    "The answer is {c} and {d}.",
    "The answer isn't {c}.",
    "Maybe the answer is {c}.",
    "Probably the answer is {c}.",
    "I guess maybe the answer is {c}.",
    "I do not think the answer is {c}.",
    "{c}, {d}",
    "({c}) ({d})",
    "neither {c} nor {d}",
    "\\boxed{{}} {c}",
    "\\boxed{{{c} + 1}}",
    "The answer is {c}. The answer is {d}.",
)

# Right and wrong spellings of expressions, {a} and {b} any of 2 to 9, {r} a prime.
EXPRESSIONS = (
    (
        "{a}\\sqrt{{{r}}}",
        ("\\sqrt{{{r}}} \\cdot {a}", "{a} \\sqrt{r}"),
        (
            "{b1}\\sqrt{{{r}}}",
            "{a}{r}",
            "-{a}\\sqrt{{{r}}}",
            "{a}\\sqrt{{{r}}} \\text{{ or }} 1",
            "{a}\\sqrt{{{r}}}, 1",
        ),
    ),
    (
        "{a}x+{b}",
        ("{b} + {a}x", "{a}x + {b}", "{b}+x\\cdot {a}"),
        (
            "{a}x-{b}",
            "{b}x+{b}x+{a}{a}",
            "{a}x+{b}+1",
            "\\text{{not }} {a}x+{b}",
            "{a}x+{b} \\text{{ is wrong}}",
        ),
    ),
    ("(x+{a})^2", ("(x+{a})(x+{a})", "({a}+x)^2"), ("(x-{a})^2", "x^2+{a}^2", "(x+{a})^3")),
    (
        "\\frac{{{a}\\pi}}{{{r}}}",
        ("{a}\\pi/{r}", "\\frac{{{a}}}{{{r}}}\\pi"),
        (
            "\\frac{{{r}\\pi}}{{{a}{a}}}",
            "\\frac{{{a}}}{{{r}}}",
            "\\frac{{{a}\\pi}}{{{r}}} \\boxed{{1}}",
        ),
    ),
    (
        "\\left({a}, {r}{r}\\right)",
        ("({a},{r}{r})", "({a}, {r}{r})"),
        ("({r}{r}, {a})", "({a}, {r}{r}, 1)", "{a}"),
    ),
)


def _numbers(gold: Gold, rng: random.Random) -> tuple[str, bool, str, bool]:
    """(completion, right, rule, whether it is a sum)."""
    wrong = numeral(gold.value + rng.choice([1, 2, 10, 100]))
    plain = numeral(gold.value)
    if gold.kind == "factorial":
        value = rng.choice(factorials(gold))
        frame = rng.choice(BOXES)
        completion = frame.format(a=value.text, w="17")
        return completion, value.right, f"{value.rule} in a box", value.sum
    if rng.random() < 0.3:
        rule, frame = rng.choice(DENIALS)
        return frame.format(a=plain, w=wrong), False, rule, False
    value = rng.choice(spellings(gold)) if rng.random() < 0.55 else changes(gold, rng)
    frames = [(BOXES, "in a box")]
    if not value.latex:
        frames.append((LINES, "in a line"))
    if value.right or (value.latex and value.rule != "nested box"):
        frames.append((FORMULAS, "in a formula"))
    if value.plain and not value.latex:
        frames.append((SENTENCES, "in a sentence"))
    table, place = rng.choice(frames)
    completion = rng.choice(table).format(a=value.text, w=wrong)
    return completion, value.right, f"{value.rule} {place}", value.sum


def _choices(gold: Gold, rng: random.Random) -> tuple[str, bool, str]:
    letter = next(letter for letter in gold.text if letter in "ABCDE")
    other = rng.choice([c for c in "ABCDE" if c != letter])
    if rng.random() < 0.3:
        return rng.choice(CHOICE_DENIALS).format(c=letter, d=other), False, "choice denied"
    right = rng.random() < 0.6
    shown, last = (letter, other) if right else (other, letter)
    return rng.choice(CHOICE_FRAMES).format(c=shown, d=last), right, "choice"


def _expression(rng: random.Random) -> Pair:
    gold, right, wrong = rng.choice(EXPRESSIONS)
    a, b, prime = rng.randint(2, 9), rng.randint(2, 9), rng.choice([3, 5, 7])
    names = {"a": a, "b": b, "b1": a + 1, "r": prime}
    is_right = rng.random() < 0.5
    value = rng.choice(right if is_right else wrong).format(**names)
    frame = rng.choice(BOXES[:5] + FORMULAS[:2] if is_right else BOXES[:5])
    completion = frame.format(a=value, w="17")
    return Pair(completion, gold.format(**names), is_right, "expression", "math")


def pairs(count: int, seed: int, expressions: float = 0.02) -> Iterator[Pair]:
    """`count` labelled pairs; a share of `expressions` needs a symbolic judge."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < expressions:
            yield _expression(rng)
            continue
        gold = golds(rng)
        grader = rng.choice(["number", "math"])
        if gold.kind == "choice":
            completion, right, rule = _choices(gold, rng)
            yield Pair(completion, gold.text, right, rule, "math")
            continue
        completion, right, rule, is_sum = _numbers(gold, rng)
        counts = rng.random() < 0.5
        yield Pair(
            completion,
            gold.text,
            right and (counts or not is_sum),
            f"{gold.kind}: {rule}",
            grader,
            counts,
        )
