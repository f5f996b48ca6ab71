"""A grader proves itself: every gold answer of a data set scores 1."""

from __future__ import annotations

import pytest
from stated_answers import gold

from asymgrpo.tasks import Task, grade_many

ROWS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40}


def wrong_ones(task: Task, completions: list[str], rows: list) -> list[tuple[str, str]]:
    grades = grade_many(task, completions, rows)
    assert len(grades) == len(completions)
    return [
        (text[-60:], grade.reason)
        for text, grade in zip(completions, grades, strict=True)
        if grade.score != 1.0 or grade.failed
    ]


def test_every_gold_answer_scores_one(data_set: Task) -> None:
    rows = list(data_set.examples("test"))
    assert len(rows) == ROWS[data_set.name]
    for statement in ("So \\boxed{{{}}}.", "#### {}", "The answer is ${}$."):
        assert wrong_ones(data_set, [statement.format(gold(row)) for row in rows], rows) == []


def test_every_gsm8k_row_of_both_splits(gsm8k: Task) -> None:
    rows = [*gsm8k.examples("train"), *gsm8k.examples("test")]
    assert len(rows) == 8792
    assert wrong_ones(gsm8k, [row["answer"] for row in rows], rows) == []
    # A rationale that speaks of "the answer" states one, and that one would count.
    rows = [row for row in rows if "answer" not in row["answer"]]
    assert len(rows) > 8700
    last_number = [f"{row['answer'].split('####')[0]}\nThat is ${gold(row)}." for row in rows]
    assert wrong_ones(gsm8k, last_number, rows) == []


def test_the_solutions_of_math500_score_one(math500: Task) -> None:
    rows = list(math500.examples("test"))
    assert wrong_ones(math500, [row["solution"] for row in rows], rows) == []


@pytest.mark.parametrize("name", ["gsm8k", "math500"])
def test_a_completion_without_an_answer_scores_zero_and_says_so(
    name: str, request: pytest.FixtureRequest
) -> None:
    task = request.getfixturevalue(name)
    grade = task.grade("I do not know.", task.examples("test")[0])
    assert (grade.score, grade.answer, grade.failed) == (0.0, None, False)
    assert "no answer" in grade.reason
