"""The built-in task: short word problems whose answer is a running total. No torch, no data files.

A problem is a starting count and two to four gains or losses. Rows are drawn on access from a seed
and an index, so that a split costs no memory. Which split a problem belongs to is decided by a
checksum of its numbers alone: no seed, name or verb can carry a test problem into training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, overload

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Example, Grade
from asymgrpo.tasks.graders import grade_number

SPLITS = ("train", "test")
TEST_SHARE = 8
"""One number sequence in so many belongs to the test split."""

_PEOPLE = (
    ("Mia", "She"),
    ("Tom", "He"),
    ("Ana", "She"),
    ("Ben", "He"),
    ("Eva", "She"),
    ("Leo", "He"),
)
_THINGS = ("coins", "pens", "cards", "shells", "stamps", "beads")
_GAINS = ("finds", "buys", "wins")
_LOSSES = ("loses", "sells", "drops")
_SMALLEST, _LARGEST = 10, 99
_FEWEST_CHANGES, _MOST_CHANGES = 2, 4


def split_of(numbers: Sequence[int]) -> str:
    """The split of a problem: the same for all wordings of the same numbers.

    >>> split_of([47, 38, -19]) in SPLITS
    True
    """
    key = " ".join(str(number) for number in numbers)
    return "test" if zlib.crc32(key.encode()) % TEST_SHARE == 0 else "train"


class ArithmeticRows(Sequence[Example]):
    """Rows made when asked for; equal seed, split and index give an equal row.

    >>> rows = ArithmeticRows("test", seed=0, size=1_000)
    >>> rows[3] == rows[:5][3], len(rows)
    (True, 1000)
    """

    def __init__(self, split: str, seed: int, size: int) -> None:
        self.split, self.seed, self.size = split, seed, size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return self._row(index % self.size)

    def _row(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        numbers = _draw_numbers(rng)
        while split_of(numbers) != self.split:
            numbers = _draw_numbers(rng)
        return {
            "id": f"{self.split}-{index}",
            "question": _question(numbers, rng),
            "answer": str(sum(numbers)),
            "numbers": numbers,
        }


@dataclass(frozen=True)
class ArithmeticTask:
    """Word problems with a running total; the task that the built-in model is pre-trained on.

    >>> task = ArithmeticTask()
    >>> row = task.examples("test")[0]
    >>> task.prompt(row)
    'Ana has 33 cards. She finds 58, sells 37 and buys 60. How many cards now?'
    >>> task.grade(" Quickly: 33 + 58 = 91, - 37 = 54, + 60 = 114. The answer is 114.", row).score
    1.0
    """

    seed: int = 0
    """Draws other problems; train and test stay disjoint across seeds."""
    prompt_template: str = "{question}"
    train_rows: int = 10_000_000
    """Rows are made on access, so this is a bound and no cost."""
    test_rows: int = 1_000
    name: str = "arithmetic"

    def __post_init__(self) -> None:
        if "{question}" not in self.prompt_template:
            raise UserError(f"the prompt template {self.prompt_template!r} lacks {{question}}")
        if min(self.train_rows, self.test_rows) < 1:
            raise UserError("train_rows and test_rows must be at least 1")

    def examples(self, split: str) -> Sequence[Example]:
        """Rows with `id`, `question`, `answer` and the signed `numbers` that sum to it."""
        if split not in SPLITS:
            raise UserError(f"arithmetic has no split {split!r}; use one of {', '.join(SPLITS)}")
        size = self.train_rows if split == "train" else self.test_rows
        return ArithmeticRows(split, self.seed, size)

    def prompt(self, example: Example) -> str:
        return self.prompt_template.replace("{question}", str(example["question"]))

    def grade(self, completion: str, example: Example) -> Grade:
        """As `grade_number` reads it; a sum that is not worked out is no answer."""
        grade = grade_number(completion, str(example["answer"]), unevaluated=False)
        return replace(grade, answer=grade.key or grade.answer)


def _draw_numbers(rng: random.Random) -> list[int]:
    """A start and signed changes, the running total never below zero."""
    changes = rng.randint(_FEWEST_CHANGES, _MOST_CHANGES)
    while True:
        numbers = [rng.randint(_SMALLEST, _LARGEST)]
        numbers += [rng.choice((1, -1)) * rng.randint(_SMALLEST, _LARGEST) for _ in range(changes)]
        if min(accumulate(numbers)) >= 0:
            return numbers


def _question(numbers: Sequence[int], rng: random.Random) -> str:
    name, pronoun = rng.choice(_PEOPLE)
    thing = rng.choice(_THINGS)
    changes = [f"{rng.choice(_GAINS if n > 0 else _LOSSES)} {abs(n)}" for n in numbers[1:]]
    told = f"{', '.join(changes[:-1])} and {changes[-1]}"
    return f"{name} has {numbers[0]} {thing}. {pronoun} {told}. How many {thing} now?"
