"""The table of faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/faults.md").read_text())


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_in_the_table_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_fault_that_is_tested_is_in_the_table() -> None:
    written = {
        name
        for path in (ROOT / "tests/faults").glob("test_*.py")
        if path != Path(__file__)
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    small = {
        "test_none_stands_for_a_completion_that_cannot_be_scored",
        "test_rollouts_with_other_columns_are_one_line",
    }
    assert written - small <= {name for _, name in NAMED}
