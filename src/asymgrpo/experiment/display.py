"""Lines and numbers for a terminal, whatever the names and the values are. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from asymgrpo.experiment.store import METRICS_FILE, RunStore
from asymgrpo.visible import visible

SHOWN = ("reward", "entropy")
"""Metrics that a progress display shows."""


def tell(console: Console, line: str) -> None:
    """Print a line as it is: a name in it is neither markup nor a command to the terminal.

    >>> tell(Console(width=80), "wrote runs/[x]\\x1b[2J")
    wrote runs/[x]<U+001B>[2J
    """
    console.print(Text(visible(line)), soft_wrap=True)


def progress_note(values: Mapping[str, Any]) -> str:
    """The numbers beside a progress bar; one that is not known is a dash.

    >>> progress_note({"reward": 0.5, "entropy": None}), progress_note({"reward": 1e39})
    ('reward 0.500  entropy -', 'reward 1e+39')
    """
    return "  ".join(f"{key} {short(values[key])}" for key in SHOWN if key in values)


def short(value: Any) -> str:
    """A number in few characters."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"


class MetricsTail:
    """The newest numbers of a run's log, of which each line is read once."""

    def __init__(self, store: RunStore):
        self.path = store.folder / METRICS_FILE
        self._start_anew(None)

    def _start_anew(self, inode: int | None) -> None:
        self.inode, self.size, self.position = inode, 0, 0
        self.step = 0
        self.seen: dict[str, Any] = {}

    def look(self) -> tuple[int, dict[str, Any]]:
        """The last step, and the last value of each number that is shown."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._start_anew(None)
            return self.step, self.seen
        if found.st_ino != self.inode or found.st_size < self.size:  # it was written anew
            self._start_anew(found.st_ino)
        if found.st_size > self.size:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read()
            whole = data.rfind(b"\n") + 1  # the rest is still being written
            self.size, self.position = self.position + len(data), self.position + whole
            for line in data[:whole].splitlines():
                self._take(line)
        return self.step, self.seen

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return  # whoever reads the log for its numbers says what is wrong with it
        if isinstance(row, dict) and type(row.get("step")) is int:
            self.step = row["step"]
            self.seen |= {key: row[key] for key in SHOWN if key in row}
