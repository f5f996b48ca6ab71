"""One value, many spellings; and texts that state more than one answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asymgrpo.tasks.graders import grade_math, grade_number, grade_text
from asymgrpo.tasks.quantities import read_quantity, same_quantity

SAME_NUMBER = [
    ("1200", "1,200"),
    ("1200", "$1,200.00"),
    ("1200", "\\$1{,}200"),
    ("1200", "1\\,200"),
    ("1200", "1 200"),
    ("1200", "**1200**"),
    ("1200", "1.2 thousand"),
    ("1200", "1200 dollars"),
    ("1200", "1200 USD"),
    ("1200", "€1200"),
    ("1200", "1200 kilometers per hour"),
    ("1200", "1200 m^2"),
    ("1200", "1200 square feet"),
    ("1200", "1200\\text{ apples}"),
    ("1200", "+1200"),
    ("1200", "2400/2"),
    ("25", "25%"),
    ("25", "25\\%"),
    ("25", "25 percent"),
    ("0.25", "25%"),
    ("0.25", "1/4"),
    ("0.25", "\\frac{1}{4}"),
    ("0.25", "\\dfrac14"),
    ("0.25", ".25"),
    ("0.25", "0.2500"),
    ("1.5", "1 1/2"),
    ("1.5", "1\\frac{1}{2}"),
    ("1.5", "1½"),
    ("-7", "-7"),
    ("-7", "−7"),
    ("-7", "-$7"),
    ("-7", "$-7"),
    ("025", "25"),
    ("1/3", "0.3333333"),
]
DIFFERENT_NUMBER = [
    ("1200", "1,2,0,0"),
    ("1200", "12,00"),
    ("1200", "1200 or 1300"),
    ("1200", "1200, 1300"),
    ("1200", "1200 thousand"),
    ("1200", "-1200"),
    ("0.5", "0.05"),
    ("1/3", "0.33"),
    ("5", "5/0"),
    ("5", "5x"),
    ("5", "5 pi"),
    ("5", "5 and 6"),
    ("25", "0.25"),
    ("2.5", "2.5000001"),
]


@pytest.mark.parametrize(("reference", "answer"), SAME_NUMBER)
def test_spellings_of_one_number_agree(reference: str, answer: str) -> None:
    for completion in (f"The answer is {answer}.", f"#### {answer}", f"\\boxed{{{answer}}}"):
        grade = grade_number(completion, reference)
        assert grade.score == 1.0, grade


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT_NUMBER)
def test_other_numbers_differ(reference: str, answer: str) -> None:
    for completion in (f"The answer is {answer}.", f"#### {answer}", f"\\boxed{{{answer}}}"):
        grade = grade_number(completion, reference)
        assert (grade.score, grade.failed) == (0.0, False), grade


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 9 eggs at $2, so she makes $18.", "18"),
        ("10 - 5 = 5", "5"),
        ("10-5=-5", "-5"),
        ("It drops to -5 degrees.", "-5"),
        ("<<16-3-4=9>>9 eggs", "9"),
        ("The answer is 3 + 4 = 7 apples.", "7"),
        ("The answer is 5 apples for 3 people.", "5"),
        ("The answer is: **42**", "42"),
        ("The final answer is \\(42\\).", "42"),
        ("Answer: $42", "42"),
        ("#### 42\n", "42"),
        ("The answer is that she sold 42 clips.", "42"),
        ("so \\boxed{42} is the answer. The answer is correct.", "42"),
        ("$\\boxed{\\boxed{42}}$", "42"),
        ("We get \\boxed 42.", "42"),
        ("\\fbox{42}", "42"),
        ("\\boxed{42} and then \\boxed{4", "42"),
        ("1 2 3 4 5 6 7 8 9 42", "42"),
        ("It is 1,2,3", "3"),
        ("He finds 3.5 million shells", "3500000"),
    ],
)
def test_the_last_stated_number_is_read(text: str, number: str) -> None:
    assert grade_number(text, number).score == 1.0, grade_number(text, number)


@pytest.mark.parametrize("grader", [grade_number, grade_math])
@pytest.mark.parametrize(
    "text",
    [
        " ".join(map(str, range(1, 100))),
        " ".join(f"\\boxed{{{n}}}" for n in range(1, 100)),
        "\\boxed{" + ", ".join(map(str, range(1, 100))) + "}",
        "\\boxed{" + " or ".join(map(str, range(1, 100))) + "}",
        "\\boxed{7 \\text{ or } 8}",
        "\\boxed{7} \\text{ or } \\boxed{8}",
        "The answer is 7. No, the answer is 8.",
        "The answer is 7, 8 or 9",
        "#### 7\n#### 8",
        "#### 7 8",
        "#### 7\n\\boxed{8}",
        "\\boxed{7} The answer is 8.",
        "\\boxed{x}",
        "\\boxed{7=8}",
        "\\boxed{\\{7, 8\\}}",
        "\\boxed{6 < x < 8}",
    ],
)
def test_many_answers_do_not_score_by_chance(grader, text: str) -> None:
    grade = grader(text, "7")
    assert (grade.score, grade.failed) == (0.0, False), grade


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
        ("x^2 + 2x + 1", "(x+1)^2"),
        ("3, 5, 7", "7, 5, 3"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
        ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
        ("x=5", "5"),
        ("5", "x = 5"),
        ("\\text{(C)}", "C"),
        ("\\text{Evelyn}", "evelyn"),
        ("52_8", "52_{8}"),
        ("52_8", "52"),
        ("90^\\circ", "90"),
        ("90^\\circ", "90 degrees"),
        ("\\$18.90", "1890 cents"),
        ("864 \\mbox{ inches}^2", "864 square inches"),
        ("10\\%", "0.1"),
        ("\\begin{pmatrix} -1/2 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}-.5\\\\2\\end{pmatrix}"),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ],
)  # fmt: skip
def test_spellings_of_one_expression_agree(reference: str, answer: str) -> None:
    grade = grade_math(f"Hence \\boxed{{{answer}}}.", reference)
    assert grade.score == 1.0, grade


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("52_8", "52_9"),
        ("(3,4]", "(3,4)"),
        ("5.4 \\text{ cents}", "5.4 dollars"),
        ("15\\mbox{ cm}^2", "15\\text{ cm}"),
        ("2k", "2"),
        ("(2,4)", "(4,2)"),
        ("\\text{even}", "\\text{odd}"),
        ("235", "1 234"),
        ("1234", "1 + 234"),
    ],
)
def test_other_expressions_differ(reference: str, answer: str) -> None:
    grade = grade_math(f"Hence \\boxed{{{answer}}}.", reference)
    assert (grade.score, grade.failed) == (0.0, False), grade


def test_text_answers() -> None:
    assert grade_text("The answer is North.", "north").score == 1.0
    assert grade_text(" Paris \n", "Paris").score == 1.0
    assert grade_text("Paris or Rome", "Paris").score == 0.0


@given(
    st.integers(-(10**15), 10**15),
    st.integers(1, 10**6),
    st.sampled_from(["{}/{}", "\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}"]),
)
def test_fractions_are_read_exactly(top: int, bottom: int, shape: str) -> None:
    quantity = read_quantity(shape.format(top, bottom))
    assert quantity is not None
    assert quantity.value == Fraction(top, bottom)


@given(st.decimals(-(10**9), 10**9, places=4))
def test_decimals_are_read_exactly_with_and_without_separators(number) -> None:
    plain, grouped = read_quantity(f"{number}"), read_quantity(f"{number:,}")
    assert plain is not None
    assert grouped is not None
    assert plain.value == grouped.value == Fraction(number)
    assert same_quantity(plain, grouped)


@given(st.text(max_size=60))
def test_any_text_is_graded(text: str) -> None:
    """Nothing raises in the reading of text, and no text equals a number it does not contain."""
    read_quantity(text)
    grade = grade_number("".join(letter for letter in text if not letter.isdigit()), "7193")
    assert grade.score == 0.0
