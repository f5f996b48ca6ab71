"""Wrong answers score 0, over five thousand of them, in every way of stating an answer."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from stated_answers import STATEMENTS, gold

from asymgrpo.tasks import Example, Task, grade_many, load_task


def accepted(task: Task, pairs: list[tuple[str, Example]]) -> list[tuple[str, str]]:
    grades = grade_many(task, [text for text, _ in pairs], [row for _, row in pairs])
    # On a machine that others keep busy an answer may run out of time; it is never a 1.
    assert sum(grade.failed for grade in grades) <= 0.01 * len(grades)
    return [
        (text, grade.reason)
        for (text, _), grade in zip(pairs, grades, strict=True)
        if grade.score != 0.0
    ]


def perturbed_number(value: Fraction) -> list[str]:
    """Off by one, sign flipped, the unit changed and with it the value, a digit lost or won."""
    shown = [value + 1, value - 1, value * 10]
    if value:
        shown += [-value]
    texts = [str(number) for number in shown]
    if value:
        texts += [f"{value * 100} cents", f"{value * 60} minutes", f"{value} thousand"]
    return texts


@pytest.mark.parametrize("name", ["gsm8k", "aime24", "aime25", "amc23"])
def test_perturbed_numbers_score_zero(name: str, data_folder) -> None:
    task = load_task(name, path=data_folder / name)
    rows = list(task.examples("test"))
    values = [Fraction(gold(row).replace(",", "")) for row in rows]
    pairs = []
    for position, (row, value) in enumerate(zip(rows, values, strict=True)):
        wrong = perturbed_number(value)
        other = next(v for v in values[position + 1 :] + values if v != value)
        for number, answer in enumerate([*wrong, str(other)]):
            statement = STATEMENTS[(position + number) % len(STATEMENTS)]
            pairs.append((statement.format(answer), row))
    assert len(pairs) > {"gsm8k": 10_000}.get(name, 200)
    assert accepted(task, pairs) == []


def test_another_problems_answer_scores_zero_on_math500(math500: Task) -> None:
    rows = list(math500.examples("test"))
    answers = sorted({row["answer"] for row in rows})
    draw = random.Random(0)
    pairs = []
    for row in rows:
        other = draw.choice([answer for answer in answers if answer != row["answer"]])
        pairs.append((f"Hence \\boxed{{{other}}}.", row))
    assert accepted(math500, pairs) == []


def test_changed_expressions_score_zero_on_math500(math500: Task) -> None:
    """Off by one and sign flipped, where the answer is one expression."""
    plain = [
        row
        for row in math500.examples("test")
        if not any(mark in row["answer"] for mark in (",", "text", "mbox", "=", "\\in", "_", "pm"))
        and not row["answer"].lstrip("-").isdigit()
        and "matrix" not in row["answer"]
        and "circ" not in row["answer"]
    ]
    assert len(plain) > 100
    pairs = [(f"\\boxed{{{row['answer']} + 1}}", row) for row in plain[::2]]
    pairs += [(f"\\boxed{{-({row['answer']})}}", row) for row in plain[1::2]]
    assert accepted(math500, pairs) == []
