"""The public data sets as tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from asymgrpo.tasks import Task, load_task


@pytest.fixture(scope="session", params=["gsm8k", "math500", "aime24", "aime25", "amc23"])
def data_set(request: pytest.FixtureRequest, data_folder: Path) -> Task:
    return load_task(request.param, path=data_folder / request.param)


@pytest.fixture(scope="session")
def gsm8k(data_folder: Path) -> Task:
    return load_task("gsm8k", path=data_folder / "gsm8k")


@pytest.fixture(scope="session")
def math500(data_folder: Path) -> Task:
    return load_task("math500", path=data_folder / "math500")
