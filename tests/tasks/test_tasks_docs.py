"""What docs/tasks.md says is so."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from asymgrpo.tasks import Task, task_names
from asymgrpo.tasks.answers import LONGEST_TEXT
from asymgrpo.tasks.gym import ROWS, TEST_SHARE
from asymgrpo.tasks.registry import DATA_SETS
from asymgrpo.tasks.sandbox import MEMORY_LIMIT, TIME_LIMIT
from asymgrpo.tasks.screen import DEEPEST_NESTING, LONGEST_ANSWER, LONGEST_DIGITS

PAGE = (Path(__file__).resolve().parents[2] / "docs/tasks.md").read_text()


def test_the_task_of_ones_own_runs_and_prints_what_is_shown() -> None:
    code, shown = re.search(r"```python\n(.*?)```\s*```text\n(.*?)```", PAGE, re.DOTALL).groups()
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    assert printed.getvalue() == shown
    assert isinstance(names["task"], Task)
    lines = [line for line in code[code.index("class") : code.index("\ntask")].split("\n") if line]
    assert len(lines) <= 11


def test_every_name_and_its_source_are_listed() -> None:
    table = dict(re.findall(r"^\| `([^`]+)` \| (.*?) \|", PAGE, re.MULTILINE))
    assert list(table) == task_names()
    for name, (source, grader) in DATA_SETS.items():
        assert f"`{source.dataset}`" in table[name]
        assert f"| `{grader}` |" in next(row for row in PAGE.split("\n") if f"| `{name}`" in row)
        assert all(split in table[name] for split in source.splits)


def test_the_limits_are_the_ones_in_the_code() -> None:
    text = " ".join(PAGE.split())
    for limit in (
        f"{TIME_LIMIT:g} s an answer",
        f"{MEMORY_LIMIT // 2**20} MiB",
        f"last {LONGEST_TEXT:,} characters",
        f"longer than {LONGEST_ANSWER:,} characters",
        f"deeper than {DEEPEST_NESTING} brackets",
        f"over {LONGEST_DIGITS} digits",
        {1_000_000: "a million"}[ROWS],
        {4: "one in four"}[TEST_SHARE],
    ):
        assert limit in text
