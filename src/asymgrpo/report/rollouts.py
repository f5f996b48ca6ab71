"""The rollouts that a page carries: which ones fit, and how they are packed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asymgrpo.report.distributions import is_negative
from asymgrpo.report.sources import Source

PAGE_BUDGET = 4_500_000
"""Bytes of rollouts on a page, over all runs."""
MAX_STEPS = 120
"""Saved steps read for a page, over all runs; each run has at least `MIN_STEPS` of them."""
MIN_STEPS = 12
MAX_TOKENS = 8192
"""Tokens of one rollout that carry numbers; the rest is shown as plain text."""
MAX_TEXT = 100_000
"""Characters of a prompt, or of the plain rest of a completion."""

NUMBERS = {
    "logps": "lp",
    "entropies": "h",
    "discount": "d",
    "ratio": "r",
    "weight": "w",
    "grpo_weight": "gw",
}
CODES = {"quadrant": "q", "clipped": "c"}
"""Columns of the store, and their short names on the page; codes are single digits."""
DIGITS = 5
"""Digits of a column's largest number on the page."""


@dataclass(frozen=True)
class TokenPages:
    """One run's rollouts for the token view."""

    run: str
    steps: list[int]
    saved_steps: int
    pages: list[dict[str, Any]]
    """One for each step: its prompts and its packed rollouts."""
    scales: dict[str, float]
    shown: int
    """Rollouts on the page, of the `read` ones in the steps that were read."""
    read: int
    complete: bool
    """Whether every rollout of every saved step is here."""


def read_rollouts(sources: Sequence[Source]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Rollouts by run and step; of many saved steps, evenly spaced ones with the first and last.

    No more steps are read than the page has room for a group of each.
    """
    stores = {run.name: run.store for run in sources if run.store is not None}
    saved = {name: store.rollout_steps() for name, store in stores.items()}
    having = max(1, sum(bool(steps) for steps in saved.values()))
    limit = max(MIN_STEPS, MAX_STEPS // having)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name, steps in saved.items():
        if steps:
            last = stores[name].rollouts(steps[-1])
            groups = len({row["group"] for row in last})
            room = PAGE_BUDGET // having * groups // max(1, sum(map(packed_size, last)))
            chosen = evenly(steps, max(2, min(limit, room)))
            found[name] = {
                step: last if step == steps[-1] else stores[name].rollouts(step) for step in chosen
            }
    return found


def evenly(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spaced, the first and the last among them.

    >>> evenly([1, 20, 40, 60, 80, 100], 3)
    [1, 40, 100]
    """
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    places = [round(index * (len(items) - 1) / (limit - 1)) for index in range(limit)]
    return [items[place] for place in places]


def token_pages(
    sources: Sequence[Source], rows: Mapping[str, Mapping[int, list[dict[str, Any]]]]
) -> list[TokenPages]:
    """What of `rows` fits the page, a share of its budget for each run."""
    named = [run for run in sources if run.name in rows]
    budget = PAGE_BUDGET // max(1, len(named))
    return [_run_pages(run, rows[run.name], budget) for run in named]


def _run_pages(run: Source, by_step: Mapping[int, list[dict[str, Any]]], budget: int) -> TokenPages:
    assert run.store is not None
    steps = sorted(step for step, rows in by_step.items() if rows)
    pages: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    for step in steps:
        sizes = [packed_size(row) for row in by_step[step]]
        rows = [
            by_step[step][place] for place in choose(by_step[step], sizes, budget // len(steps))
        ]
        kept += rows
        pages.append(_page(rows))
    saved = len(run.store.rollout_steps())
    read = sum(len(rows) for rows in by_step.values())
    return TokenPages(
        run=run.name,
        steps=steps,
        saved_steps=saved,
        pages=pages,
        scales=_scales(kept),
        shown=len(kept),
        read=read,
        complete=len(by_step) == saved and len(kept) == read,
    )


def choose(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], budget: int) -> list[int]:
    """Places of the rollouts to keep within `budget`, at least one.

    Whole groups come first that hold both signs, since they are what one compares; inside the
    group that no longer fits whole, positive and negative rollouts alternate.
    """
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["group"], []).append(place)
    mixed = sorted(
        groups.values(), key=lambda group: len({is_negative(rows[place]) for place in group}) < 2
    )
    kept: list[int] = []
    left = budget
    for group in mixed:
        for place in alternate(group, rows):
            if kept and sizes[place] > left:
                return sorted(kept)
            kept.append(place)
            left -= sizes[place]
    return sorted(kept)


def alternate(group: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of a group's rollouts, a positive one and a negative one in turn.

    >>> alternate([0, 1, 2], [{"advantage": 1.0}, {"advantage": 0.5}, {"advantage": -1.5}])
    [0, 2, 1]
    """
    good = [place for place in group if not is_negative(rows[place])]
    bad = [place for place in group if is_negative(rows[place])]
    ranked = [(rank, 0, place) for rank, place in enumerate(good)]
    ranked += [(rank, 1, place) for rank, place in enumerate(bad)]
    return [place for _, _, place in sorted(ranked)]


def _page(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A prompt is stored once, and rollouts point at it."""
    prompts: dict[str, int] = {}
    rollouts = []
    for row in rows:
        text = str(row.get("prompt") or "")[:MAX_TEXT]
        rollouts.append(pack(row) | {"p": prompts.setdefault(text, len(prompts))})
    return {"prompts": list(prompts), "rollouts": rollouts}


def pack(row: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout as the page reads it.

    A column that is not known is absent, one of equal values is that value, GRPO's weight is "w"
    where it equals the algorithm's own, and any other is whole numbers times a power of ten.

    >>> packed = pack({"group": 0, "rollout": 1, "tokens": ["a", "b"], "ratio": [1.0, 1.0],
    ...                "weight": [0.123456, 0.2], "grpo_weight": [0.123456, 0.2],
    ...                "quadrant": [0, 4]})
    >>> packed["t"], packed["r"], packed["w"], packed["gw"], packed["q"]
    (['a', 'b'], 1, {'e': -5, 'v': [12346, 20000]}, 'w', '04')
    """
    packed: dict[str, Any] = {"g": row.get("group"), "i": row.get("rollout")}
    for name, short in (("reward", "y"), ("advantage", "a"), ("kl", "kl")):
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            packed[short] = rounded(value)
    if row.get("truncated"):
        packed["cut"] = 1
    tokens = row.get("tokens")
    if not tokens:
        return packed | {"text": str(row.get("completion") or "")[:MAX_TEXT]}
    packed["t"] = [token or "" for token in tokens[:MAX_TOKENS]]
    packed["n"] = len(tokens)
    if len(tokens) > MAX_TOKENS:
        packed["rest"] = "".join(token or "" for token in tokens[MAX_TOKENS:])[:MAX_TEXT]
    for name, short in NUMBERS.items():
        values = row.get(name)
        if values is not None and len(values) == len(tokens):
            packed[short] = _column(values[:MAX_TOKENS])
    for name, short in CODES.items():
        values = row.get(name)
        if values is not None and len(values) == len(tokens):
            packed[short] = "".join(str(int(value or 0)) for value in values[:MAX_TOKENS])
    identities = row.get("token_ids")
    if identities is not None and len(identities) == len(tokens):
        packed["id"] = identities[:MAX_TOKENS]
    if "gw" in packed and packed["gw"] == packed.get("w"):
        packed["gw"] = "w"
    return packed


def _column(values: Sequence[Any]) -> Any:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) == len(values) and min(finite) == max(finite):
        return rounded(finite[0])
    largest = max((abs(value) for value in finite), default=0.0)
    exponent = math.floor(math.log10(largest)) - DIGITS + 1 if largest else 0
    scale = 10.0**-exponent
    return {
        "e": exponent,
        "v": [
            round(value * scale) if value is not None and math.isfinite(value) else None
            for value in values
        ],
    }


def rounded(value: Any) -> int | float | None:
    """Five significant digits; what is not finite is not a number to show.

    >>> rounded(0.123456789), rounded(1.0), rounded(float("nan")), rounded(True)
    (0.12346, 1, None, 1)
    """
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.5g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def packed_size(row: Mapping[str, Any]) -> int:
    """About the bytes of a packed rollout, without packing it."""
    size = 120 + len(json.dumps(str(row.get("completion") or "")[:MAX_TEXT]))
    tokens = len((row.get("tokens") or ())[:MAX_TOKENS])
    if not tokens:
        return size
    varied = {name for name in NUMBERS if len(set(row.get(name) or ())) > 1}
    if row.get("weight") == row.get("grpo_weight"):
        varied.discard("grpo_weight")
    # A token costs its quotes and comma, an id, two codes, and some six bytes a number.
    return size + tokens * (3 + 5 + 2 + 6 * len(varied))


def _scales(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where the colours of a run saturate: the 99th percentile of its tokens.

    One scale for all steps, so that a colour means the same wherever the slider stands.
    """
    columns = {"h": ("entropies",), "r": ("ratio",), "w": ("weight", "grpo_weight")}
    scales = {}
    for short, names in columns.items():
        values = [np.asarray(row[n], float) for row in rows for n in names if row.get(n)]
        every = np.abs(np.concatenate(values)) if values else np.empty(0)
        every = every[np.isfinite(every)]
        if short == "r":
            every = np.abs(np.log(every[every > 0]))
        limit = float(np.percentile(every, 99)) if every.size else 0.0
        if limit > 0:
            scales[short] = float(f"{limit:.3g}")
    return scales
