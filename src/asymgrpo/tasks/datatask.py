"""A task made of rows, a prompt template and a named grader."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.tasks.answers import last_boxed
from asymgrpo.tasks.base import Example, Grade
from asymgrpo.tasks.graders import GRADERS, start_math_verify
from asymgrpo.tasks.prompts import (
    Message,
    columns_of,
    conversation,
    fill,
    fill_columns,
    message_text,
    plain_text,
)
from asymgrpo.tasks.rows import SPLITS, Source, column, question_key

QUESTION_COLUMNS = ("problem", "question", "prompt")
SOLUTION_COLUMNS = ("solution", "answer")
"""What a worked example shows, the first that a row has."""
ANSWER_COLUMNS = ("answer", "solution", "reward_model")


@dataclass
class DataTask:
    """Rows with a question and a reference answer; `examples` reads them on first use."""

    name: str
    source: Source
    template: str
    grader: str
    question_columns: Sequence[str] = QUESTION_COLUMNS
    answer_columns: Sequence[str] = ANSWER_COLUMNS
    unevaluated: bool = True
    """Whether arithmetic that is not worked out (`48 + 24`) counts as its value."""
    shots: int = 0
    """Train rows that stand before the question, each with its solution."""
    _rows: dict[str, list[Example] | None] = field(default_factory=dict, repr=False)
    _compared: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.grader != "text":
            start_math_verify()

    def examples(self, split: str) -> Sequence[Example]:
        """Rows as they are in the source; warns of duplicates and of test questions in train."""
        if split not in SPLITS:
            raise UserError(f"no split {split!r}; the splits are train and test")
        rows = self._load(split)
        if rows is None:
            raise UserError(f"{self.name} has no {split} rows; {self._instead(split)}")
        self._warn_of_leaks()
        return rows

    def prompt(self, example: Example) -> str:
        """The messages as one text."""
        return plain_text(self.messages(example))

    def messages(self, example: Example) -> list[Message]:
        """Worked examples, then the row's own earlier turns, then the question in the template."""
        if columns_of(self.template):
            turns = [{"role": "user", "content": fill_columns(self.template, example)}]
        else:
            given = conversation(column(example, self.question_columns)) or []
            text = fill(self.template, self.question(example))
            turns = [*given[:-1], {"role": "user", "content": text}]
        opening = [turn for turn in turns[:1] if turn["role"] == "system"]
        return [*opening, *self._worked(example), *turns[len(opening) :]]

    def _worked(self, example: Example) -> list[Message]:
        if not self.shots:
            return []
        others = (row for row in self._shot_rows() if row != example)
        turns: list[Message] = []
        for _, row in zip(range(self.shots), others, strict=False):
            shown = DataTask(
                self.name, self.source, self.template, "text",
                self.question_columns, self.answer_columns,
            )  # fmt: skip
            solution = column(row, SOLUTION_COLUMNS) or self.reference(row)
            turns += [*shown.messages(row), {"role": "assistant", "content": str(solution)}]
        return turns

    def _shot_rows(self) -> list[Example]:
        """One more than there are shots: a row is no example of itself."""
        rows = self._load("train")
        if rows is None or len(rows) <= self.shots:
            there = 0 if rows is None else len(rows)
            raise UserError(
                f"{self.name} has {there} train rows, too few for {self.shots} worked examples"
            )
        return rows[: self.shots + 1]

    def question(self, example: Example) -> str:
        """The row's question, without the instruction around it."""
        if columns_of(self.template):
            return fill_columns(self.template, example)
        value = column(example, self.question_columns)
        if value is None:
            names = " or ".join(self.question_columns)
            raise UserError(f"{self.name}: a row has no {names} column; it has {_names(example)}")
        return message_text(value)

    def reference(self, example: Example) -> str:
        """The answer that a completion is compared with."""
        value = column(example, self.answer_columns)
        if isinstance(value, dict):
            value = value.get("ground_truth")
        if value is None:
            names = " or ".join(self.answer_columns)
            raise UserError(f"{self.name}: a row has no {names} column; it has {_names(example)}")
        return _final(value)

    def grade(self, completion: str, example: Example) -> Grade:
        try:
            reference = self.reference(example)
            return GRADERS[self.grader](completion, reference, self.unevaluated)
        except Exception as error:  # a grader never raises, and never hides that it broke
            reason = f"{type(error).__name__}: {error}"[:300]
            return Grade(0.0, None, f"the grader broke: {reason}", failed=True)

    def _load(self, split: str) -> list[Example] | None:
        if split not in self._rows:
            rows = self.source(split)
            if rows is not None:
                self._check(split, rows)
            self._rows[split] = rows
        return self._rows[split]

    def _check(self, split: str, rows: list[Example]) -> None:
        seen: set[str] = set()
        for number, row in enumerate(rows, start=1):
            try:
                question, reference = self.question(row), self.reference(row)
            except UserError as error:
                raise UserError(f"{error} ({split} row {number})") from None
            if not question.strip() or not reference.strip():
                part = "question" if not question.strip() else "answer"
                raise UserError(f"{self.name}: the {part} of {split} row {number} is empty")
            seen.add(question_key(question))
        if len(seen) < len(rows):
            warnings.warn(
                f"{self.name}: {len(rows) - len(seen)} of {len(rows)} {split} rows repeat a "
                "question",
                stacklevel=4,
            )

    def _warn_of_leaks(self) -> None:
        """Once; of a file that serves as both splits only when both have been asked for."""
        both_asked = len(self._rows) == len(SPLITS)
        if self._compared or "train" not in self._rows or (self.source.shared and not both_asked):
            return
        self._compared = True
        train, test = self._load("train"), self._load("test")
        if not train or not test:
            return
        test_questions = {question_key(self.question(row)) for row in test}
        leaked = sum(question_key(self.question(row)) in test_questions for row in train)
        if leaked:
            warnings.warn(
                f"{self.name}: {leaked} of {len(train)} train rows are test questions, so the "
                "test score will flatter",
                stacklevel=3,
            )

    def _instead(self, split: str) -> str:
        other = "test" if split == "train" else "train"
        return f"it has {other} rows only; pass --task-path with a folder that has {split}.jsonl"


def _names(example: Example) -> str:
    return ", ".join(sorted(map(str, example))) or "none"


def _final(value: Any) -> str:
    """The final answer inside a reference: after `####`, in the last box, or all of it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return boxed.text if boxed is not None and boxed.text else text.strip()
