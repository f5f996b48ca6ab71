"""The token view in a terminal: `asymgrpo inspect RUN --step N`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from asymgrpo.errors import UserError
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.distributions import is_negative
from asymgrpo.report.rollouts import alternate
from asymgrpo.visible import visible

COLUMNS = {
    "entropy": "entropies",
    "discount": "discount",
    "ratio": "ratio",
    "weight": "weight",
    "grpo-weight": "grpo_weight",
    "quadrant": "quadrant",
}
"""What tokens can be coloured by, and the store's column for it."""

GROUND = (28, 30, 36)
HUES = {
    "entropy": ((138, 82, 0), (138, 82, 0)),
    "discount": ((95, 69, 171), (95, 69, 171)),
    "ratio": ((29, 106, 76), (139, 58, 112)),
    "weight": ((156, 67, 26), (28, 95, 166)),
    "grpo-weight": ((156, 67, 26), (28, 95, 166)),
}
"""Backgrounds below and above the middle of the scale, dark enough for light text."""
QUADRANT_HUES = {1: (28, 95, 166), 2: (29, 106, 76), 3: (125, 83, 0), 4: (154, 59, 36)}
QUADRANT_NAMES = {1: "A>0 high", 2: "A>0 low", 3: "A<0 low", 4: "A<0 high"}


def inspect_run(
    store: RunStore,
    step: int | None = None,
    *,
    colour_by: str = "entropy",
    group: int | None = None,
    limit: int | None = None,
    console: Console | None = None,
) -> None:
    """Print the rollouts of a saved step, positive ones of a prompt before negative ones.

    `step` None is the last saved one; `group` keeps one prompt, `limit` that many rollouts.
    """
    if colour_by not in COLUMNS:
        raise UserError(f"no colouring {colour_by!r}; choose from {', '.join(COLUMNS)}")
    record = store.run()
    saved = store.rollout_steps()
    if not saved:
        raise UserError(f"{store.folder} has no saved rollouts")
    step = saved[-1] if step is None else step
    rows = store.rollout_columns(step, ["group", "advantage"])
    scale = scale_of(store.token_values(step, scaled_columns(colour_by)), colour_by)
    chosen = store.rollouts_at(step, _select(rows, group, limit, store, step))
    out = console or Console()
    title = f"{store.name} · {record.get('label') or record.get('algorithm') or ''} · step {step}"
    out.print(Rule(Text(visible(title))))
    out.print(legend(colour_by, scale))
    prompt: tuple[Any, Any] | None = None
    for row in chosen:
        if (row.get("group"), row.get("prompt")) != prompt:
            prompt = (row.get("group"), row.get("prompt"))
            out.print()
            out.print(Text(f"prompt {row.get('group')}", style="bold"))
            out.print(Padding(_lines(str(row.get("prompt") or "")), (0, 0, 0, 2)))
        out.print()
        out.print(head(row))
        out.print(Padding(coloured(row, colour_by, scale), (0, 0, 0, 2)))
    hidden = len(rows) - len(chosen)
    if hidden:
        out.print()
        out.print(Text(f"{hidden} more rollouts of this step are not shown", style="dim"))


def _select(
    rows: Sequence[dict[str, Any]], group: int | None, limit: int | None, store: RunStore, step: int
) -> list[int]:
    """Places of the rows to print; a limit that cuts a prompt keeps rollouts of both signs."""
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["group"], []).append(place)
    if group is not None and group not in groups:
        known = ", ".join(map(str, groups)) or "none"
        raise UserError(f"{store.folder} has no group {group} at step {step}; groups: {known}")
    wanted = [group] if group is not None else list(groups)
    places = [place for name in wanted for place in alternate(groups[name], rows)][:limit]
    order = {name: rank for rank, name in enumerate(wanted)}
    places.sort(key=lambda p: (order[rows[p]["group"]], is_negative(rows[p]), p))
    return places


def scaled_columns(colour_by: str) -> list[str]:
    """The store's columns that a colouring's scale is made of.

    >>> scaled_columns("weight"), scaled_columns("quadrant")
    (['weight', 'grpo_weight'], [])
    """
    if colour_by in ("discount", "quadrant"):
        return []
    return ["weight", "grpo_weight"] if "weight" in colour_by else [COLUMNS[colour_by]]


def scale_of(values: np.ndarray, colour_by: str) -> float:
    """Where the colour saturates: the 99th percentile over the step's tokens, [N].

    >>> scale_of(np.array([1.0, 1.0]), "entropy")
    1.0
    """
    if not scaled_columns(colour_by):
        return 1.0
    every = np.abs(values.astype(float))
    every = every[np.isfinite(every)]
    if colour_by == "ratio":
        every = np.abs(np.log(every[every > 0]))
    return float(np.percentile(every, 99)) if every.size and every.max() > 0 else 1.0


def strength(value: float | None, colour_by: str, scale: float) -> float:
    """From -1 to 1: how far a token's background goes, and to which side.

    >>> strength(0.5, "discount", 1.0), strength(-3.0, "weight", 2.0)
    (0.5, -1.0)
    """
    if value is None or not math.isfinite(value):
        return 0.0
    if colour_by == "discount":
        value = 1 - value
    elif colour_by == "ratio":
        value = math.log(value) if value > 0 else 0.0
    return max(-1.0, min(1.0, value / scale))


def coloured(row: Mapping[str, Any], colour_by: str, scale: float) -> Text:
    """A completion with each token on its background; clipped tokens are underlined."""
    tokens = row.get("tokens")
    if not tokens:
        return _lines(str(row.get("completion") or ""))
    values = row.get(COLUMNS[colour_by]) or [None] * len(tokens)
    clipped = row.get("clipped") or [False] * len(tokens)
    text = Text()
    for token, value, cut in zip(tokens, values, clipped, strict=True):
        shown = token or ""
        style = _style(value, colour_by, scale) + Style(underline=bool(cut) or None)
        text.append(visible(shown, spaces=shown.strip(" ") == "") or "∅", style)
        text.append("\n" * shown.count("\n"))
    return text


def _style(value: Any, colour_by: str, scale: float) -> Style:
    if colour_by == "quadrant":
        hue = QUADRANT_HUES.get(value)
        return Style(bgcolor=_colour(hue), color="#f4f4f4", bold=True) if hue else Style()
    size = strength(value, colour_by, scale)
    if abs(size) < 0.02:
        return Style()
    low, high = HUES[colour_by]
    hue = high if size > 0 else low
    mixed = tuple(
        round(ground + abs(size) * (full - ground))
        for ground, full in zip(GROUND, hue, strict=True)
    )
    return Style(bgcolor=_colour(mixed), color="#f4f4f4")


def _colour(hue: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*hue)


def legend(colour_by: str, scale: float) -> Text:
    """The scale, as blocks of its colours."""
    text = Text().append(f"{colour_by}  ", "bold")
    if colour_by == "quadrant":
        for number, name in QUADRANT_NAMES.items():
            text.append(f" Q{number} {name} ", _style(number, colour_by, scale))
            text.append(" ")
        return text.append("underlined: clipped, no gradient", "dim")
    if colour_by == "ratio":
        ends = (1 / math.exp(scale), 1.0, math.exp(scale))
    elif colour_by == "discount":
        ends = (1.0, 0.5, 0.0)
    elif colour_by == "entropy":
        ends = (0.0, scale / 2, scale)
    else:
        ends = (-scale, 0.0, scale)
    blocks = np.linspace(-1 if colour_by not in ("entropy", "discount") else 0, 1, 9)
    low, _, high = ends
    text.append(f"{low:.3g} ")
    for block in blocks:
        text.append("  ", _block(float(block), colour_by))
    return text.append(f" {high:.3g}   ").append("underlined: clipped, no gradient", "dim")


def _block(size: float, colour_by: str) -> Style:
    value = {"discount": 1 - size, "ratio": math.exp(size)}.get(colour_by, size)
    return _style(value, colour_by, 1.0)


def head(row: Mapping[str, Any]) -> Text:
    """One line on a rollout: sign, reward, advantage, length."""
    negative = is_negative(row)
    text = Text()
    text.append("− " if negative else "+ ", "bold red" if negative else "bold green")
    text.append(f"rollout {row.get('rollout')}")
    for name, spec in (("reward", ".3g"), ("advantage", "+.3f"), ("kl", ".3g")):
        value = row.get(name)
        if isinstance(value, int | float):
            text.append(f" · {name} {value:{spec}}")
    if row.get("tokens"):
        text.append(f" · {len(row['tokens'])} tokens")
    kept = kept_share(row)
    if kept is not None:
        text.append(f" · {kept:.0%} of GRPO's weight")
    if row.get("truncated"):
        text.append(" · cut off", "yellow")
    return text


def kept_share(row: Mapping[str, Any]) -> float | None:
    """Sum of the weights' sizes over GRPO's.

    >>> kept_share({"weight": [0.5, -0.5], "grpo_weight": [1.0, -1.0]})
    0.5
    """
    if not row.get("weight") or not row.get("grpo_weight"):
        return None
    whole = float(np.nansum(np.abs(np.asarray(row["grpo_weight"], float))))
    return float(np.nansum(np.abs(np.asarray(row["weight"], float)))) / whole if whole else None


def _lines(text: str) -> Text:
    return Text("\n".join(visible(line) for line in text.split("\n")))
