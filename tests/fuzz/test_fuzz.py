"""A short run of what `make fuzz` runs at length."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import TARGETS, feed

INPUTS = 2000


@pytest.mark.parametrize("name", TARGETS)
def test_only_user_errors_come_out(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=INPUTS * target.share // 100,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def check(value: Any) -> None:
        feed(target, value)

    check()


def test_the_shares_add_up() -> None:
    assert sum(target.share for target in TARGETS.values()) == 100


@pytest.mark.parametrize("tail", ["a" * 340 + "!", "a " * 8 + "!", ("a" + " " * 40) * 8 + "!"])
@pytest.mark.parametrize("name", ["grade-number", "grade-text", "grade-math"])
def test_long_units_take_no_time(name: str, tail: str) -> None:
    """Words after a number that could be split in very many ways."""
    feed(TARGETS[name], (f"0{tail}", f"1{tail}"))
