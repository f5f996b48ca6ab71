"""Grading many completions at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Example, Grade, Task


def grade_many(
    task: Task,
    completions: Sequence[str],
    examples: Sequence[Example],
    workers: int | None = None,
) -> list[Grade]:
    """The grade of every completion, in order; a grader that raises gives a failed grade.

    A score that is no number from 0 to 1 is a `UserError`.

    Threads are enough: plain numbers take microseconds, and everything slow runs in the
    sandbox's own processes.

    >>> class Echo:
    ...     name = "echo"
    ...     def examples(self, split): return [{"word": "hi"}]
    ...     def prompt(self, example): return f"Say {example['word']}"
    ...     def grade(self, completion, example):
    ...         return Grade(float(completion == example["word"]), completion, "compared")
    >>> [grade.score for grade in grade_many(Echo(), ["hi", "ho"], [{"word": "hi"}] * 2)]
    [1.0, 0.0]
    """
    if len(completions) != len(examples):
        raise ValueError(f"{len(completions)} completions, but {len(examples)} examples")
    grades: list[Grade | None] = [None] * len(completions)
    pending = iter(range(len(completions)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(pending, None)
            if index is None:
                return
            grades[index] = _grade(task, completions[index], examples[index])

    count = min(workers or os.cpu_count() or 1, max(1, len(completions)))
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()
    return [grade for grade in grades if grade is not None]


def _grade(task: Task, completion: str, example: Example) -> Grade:
    try:
        grade = task.grade(completion, example)
    except Exception as error:  # a task of the user's own; its failure is counted, not hidden
        reason = f"the grader broke: {type(error).__name__}: {error}"[:300]
        return Grade(0.0, None, reason, failed=True)
    if not isinstance(grade, Grade):
        raise UserError(
            f"the grader of {task.name} returned {type(grade).__name__}; return an "
            "asymgrpo.tasks.Grade(score, answer, reason)"
        )
    number = isinstance(grade.score, int | float | np.number)
    if not number or not 0 <= grade.score <= 1:  # not so for NaN either
        raise UserError(
            f"the grader of {task.name}: a score is a number from 0 to 1, not {grade.score}; "
            "scale its scores"
        )
    return grade
