"""A task: rows, the prompt of a row, and a grade for a completion of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Example = Mapping[str, Any]


@dataclass(frozen=True)
class Grade:
    """What a grader says of one completion, and why.

    >>> Grade(1.0, "42", "equal to the reference").score
    1.0
    """

    score: float
    """1 for right, 0 for wrong; a scorer may give partial credit in between."""
    answer: str | None
    """The answer that was read out of the completion, None if there was none."""
    reason: str
    """One line: why this score."""
    failed: bool = False
    """The grader itself broke or ran out of time, so the score says nothing of the completion."""
    key: str | None = None
    """A name that equal answers share, whatever their spelling; None if the grader has none."""


@runtime_checkable
class Task(Protocol):
    """All that a task must offer; any class with these four members is one."""

    name: str

    def examples(self, split: str) -> Sequence[Example]:
        """Rows of `train` or `test`, the source's own fields kept. May be lazy and very long."""
        ...

    def prompt(self, example: Example) -> str:
        """The text that a user would type; chat templates are applied elsewhere."""
        ...

    def grade(self, completion: str, example: Example) -> Grade:
        """Never raises: a grader that breaks says so in its `Grade`."""
        ...


def reference_of(task: Task, example: Example) -> str | None:
    """The answer that completions are compared with, where the task or the row tells it.

    >>> class Sums:
    ...     def reference(self, example): return str(sum(example["numbers"]))
    >>> reference_of(Sums(), {"numbers": [1, 2]})
    '3'
    """
    own = getattr(task, "reference", None)
    found = own(example) if callable(own) else example.get("answer")
    return None if found is None else str(found)
