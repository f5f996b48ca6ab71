"""Ways in which a model states an answer, and the answer it should state."""

from __future__ import annotations

from asymgrpo.tasks import Example

STATEMENTS = (
    "#### {}",
    "The answer is {}.",
    "So we get \\boxed{{{}}}.",
    "First 3 + 4 = 7, then we add the rest. That makes {} in all.",
)


def gold(row: Example) -> str:
    """The reference answer, read without the library's help."""
    answer = row["answer"]
    if isinstance(answer, float):
        return str(int(answer))
    return str(answer).split("####")[-1].strip()
