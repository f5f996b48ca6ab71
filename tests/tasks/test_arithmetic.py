"""The built-in task: reproducible rows, disjoint splits, and a grader that proves itself."""

import re
import subprocess
import sys

import pytest

from asymgrpo.errors import UserError
from asymgrpo.tasks.arithmetic import ArithmeticTask, split_of
from asymgrpo.tasks.base import Task

GAINS = {"finds", "buys", "wins"}


def numbers_read_from(question: str) -> list[int]:
    """Solves the text itself, as a reader would, rather than trusting the row's fields."""
    start = int(re.search(r"has (\d+)", question)[1])
    changes = re.findall(r"(finds|buys|wins|loses|sells|drops) (\d+)", question)
    return [start] + [int(n) if verb in GAINS else -int(n) for verb, n in changes]


@pytest.fixture(scope="module")
def rows():
    task = ArithmeticTask()
    return [*task.examples("train")[:4_000], *task.examples("test")]


def test_is_a_task():
    assert isinstance(ArithmeticTask(), Task)


def test_answers_follow_from_the_text(rows):
    for row in rows:
        numbers = numbers_read_from(row["question"])
        assert numbers == row["numbers"]
        assert str(sum(numbers)) == row["answer"]
        totals = [sum(numbers[: i + 1]) for i in range(len(numbers))]
        assert min(totals) >= 0


def test_gold_answers_score_1_and_perturbed_ones_0(rows):
    task = ArithmeticTask()
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        gold = int(row["answer"])
        for right in (f"The answer is {gold}.", f" {gold}", f"7 so the answer is: {gold}.0, not 7"):
            assert task.grade(right, row).score == 1.0, (right, row)
        wrong = {gold + 1, gold - 1, gold + 10, gold * 10, int(other["answer"])} - {gold}
        wrong |= {-gold} if gold else set()
        for value in wrong:
            assert task.grade(f"{gold} is close. The answer is {value}.", row).score == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("The answer is 1,234.", "1234", 1.0),
        ("The answer is 12. No: the answer is 1234.", "1234", 1.0),
        ("1234 - 0", "0", 0.0),
        ("it is 10-1234", "1234", 0.0),  # a difference or a range, and no statement of 1234
        ("1230 + 4 = 1234", "1234", 1.0),
        ("the answer is -1234", "-1234", 0.0),
        ("no idea", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_what_is_read_as_the_answer(completion, answer, score):
    grade = ArithmeticTask().grade(completion, {"answer": "1234"})
    assert (grade.answer, grade.score, grade.failed) == (answer, score, False)


def test_a_megabyte_of_digits_is_graded():
    assert ArithmeticTask().grade("9" * 1_000_000, {"answer": "9"}).score == 0.0


def test_splits_are_disjoint_for_all_seeds():
    drawn = {"train": set(), "test": set()}
    for seed in range(3):
        for split, seen in drawn.items():
            seen |= {tuple(row["numbers"]) for row in ArithmeticTask(seed).examples(split)[:1_000]}
    assert not drawn["train"] & drawn["test"]
    assert all(split_of(numbers) == split for split, seen in drawn.items() for numbers in seen)
    assert len(drawn["test"]) > 2_990  # next to no problem is drawn twice


def test_rows_depend_on_seed_split_and_index_only():
    first, again, other = ArithmeticTask(5), ArithmeticTask(5), ArithmeticTask(6)
    assert first.examples("train")[17] == again.examples("train")[:20][17]
    assert first.examples("test")[-1] == again.examples("test")[999]
    assert first.examples("train")[17] != other.examples("train")[17]
    assert first.examples("train")[9_999_999]["id"] == "train-9999999"
    with pytest.raises(IndexError):
        first.examples("test")[1_000]


def test_mistakes_are_explained():
    with pytest.raises(UserError, match="use one of train, test"):
        ArithmeticTask().examples("validation")
    with pytest.raises(UserError, match=r"lacks \{question\}"):
        ArithmeticTask(prompt_template="Solve:")


def test_a_template_wraps_the_question():
    task = ArithmeticTask(prompt_template="{question} End with: The answer is N.")
    row = task.examples("test")[0]
    assert task.prompt(row) == row["question"] + " End with: The answer is N."


def test_importing_needs_no_heavy_library():
    code = (
        "import sys, asymgrpo.tasks.arithmetic;"
        "assert not {'torch', 'datasets', 'math_verify', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
