"""Rows of the public data sets, and ways in which a model states an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymgrpo.tasks import Example, Task, load_task

STATEMENTS = (
    "#### {}",
    "The answer is {}.",
    "So we get \\boxed{{{}}}.",
    "First 3 + 4 = 7, then we add the rest. That makes {} in all.",
)


@pytest.fixture(scope="session", params=["gsm8k", "math500", "aime24", "aime25", "amc23"])
def data_set(request: pytest.FixtureRequest, data_folder: Path) -> Task:
    return load_task(request.param, path=data_folder / request.param)


@pytest.fixture(scope="session")
def gsm8k(data_folder: Path) -> Task:
    return load_task("gsm8k", path=data_folder / "gsm8k")


@pytest.fixture(scope="session")
def math500(data_folder: Path) -> Task:
    return load_task("math500", path=data_folder / "math500")


def gold(row: Example) -> str:
    """The reference answer, read without the library's help."""
    answer = row["answer"]
    if isinstance(answer, float):
        return str(int(answer))
    return str(answer).split("####")[-1].strip()
