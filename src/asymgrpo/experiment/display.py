"""Lines and numbers for a terminal, whatever the names and the values are. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

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
