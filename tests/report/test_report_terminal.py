"""The token view in a terminal."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asymgrpo.errors import UserError
from asymgrpo.experiment.store import RunStore
from asymgrpo.report import COLOURINGS, inspect_run
from asymgrpo.report.terminal import coloured, strength


def shown(store: RunStore, step: int | None = None, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system="truecolor")
    inspect_run(store, step, console=console, **options)
    return out.getvalue()


def plain(store: RunStore, step: int | None = None, **options: Any) -> str:
    out = io.StringIO()
    inspect_run(store, step, console=Console(file=out, width=200), **options)
    return out.getvalue()


def test_rollouts_of_a_step_positive_before_negative(runs: Path) -> None:
    store = RunStore(runs / "sa-ah-grpo-s0")
    rows = store.rollouts(100)
    text = plain(store, 100, group=1)
    order = [line[0] for line in text.splitlines() if line[:9] in ("+ rollout", "− rollout")]
    own = [row for row in rows if row["group"] == 1]
    negative = sum(row["advantage"] < 0 for row in own)
    assert order == ["+"] * (len(own) - negative) + ["−"] * negative
    for row in own:
        assert row["completion"].split("\n")[0] in text.replace("↵", "")
    assert f"{len(rows) - len(own)} more rollouts" in text
    few = plain(store, 100, limit=2)
    assert [line[0] for line in few.splitlines() if line[2:9] == "rollout"] == ["+", "−"]
    assert "step 200" in plain(store)


@pytest.mark.parametrize("colouring", COLOURINGS)
def test_every_colouring_colours(runs: Path, colouring: str) -> None:
    text = shown(RunStore(runs / "sa-ah-grpo-s0"), 1, colour_by=colouring)
    assert text.count("\x1b[") > 50


def test_a_token_s_colour_follows_its_number() -> None:
    row = {"tokens": ["a", "b", "c"], "weight": [0.0, 1.0, -2.0], "clipped": [True, False, False]}
    text = coloured(row, "weight", 2.0)
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["a"].underline
    assert styles["a"].bgcolor is None
    blue, orange = styles["b"].bgcolor.triplet, styles["c"].bgcolor.triplet
    assert tuple(orange) == (156, 67, 26)  # the end of the scale
    # half of the way from the ground (28, 30, 36) to the blue end (28, 95, 166); halves go to even
    assert tuple(blue) == (28, 62, 101)
    assert strength(math.e, "ratio", 2.0) == pytest.approx(0.5)
    assert strength(math.nan, "entropy", 1.0) == 0.0


def test_text_is_shown_not_obeyed(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    store.write_run({"algorithm": "grpo", "label": "[red]x[/red]\x1b[2J"})
    bad = "[bold]a[/bold] \x1b[31mred\x07 \u202eabc\u200b"
    row = {"step": 1, "group": 0, "rollout": 0, "prompt": bad, "reward": 1.0, "advantage": 1.0}
    store.write_rollouts(
        1,
        [
            row | {"completion": bad, "tokens": [bad, "\n", " "], "entropies": [1.0, 0.5, 0.0]},
            row | {"rollout": 1, "completion": bad},
        ],
    )
    text = plain(store, 1)
    assert text.count("[bold]a[/bold] <U+001B>[31mred<U+0007> <U+202E>abc<U+200B>") == 3
    assert "[red]x[/red]<U+001B>[2J" in text
    assert not any(character in text for character in "\x1b\x07\u202e\u200b")
    assert "↵" in text
    assert "·" in text


def test_mistakes_are_said(runs: Path, tmp_path: Path) -> None:
    store = RunStore(runs / "grpo-s0")
    with pytest.raises(UserError, match="no colouring 'mood'; choose from entropy"):
        inspect_run(store, 100, colour_by="mood")
    with pytest.raises(UserError, match="saved steps: 1, 100, 200"):
        inspect_run(store, 7)
    with pytest.raises(UserError, match="no group 9 at step 100; groups: 0, 1, 2, 3"):
        inspect_run(store, 100, group=9)
    empty = RunStore(tmp_path / "run")
    empty.write_run({"algorithm": "grpo"})
    with pytest.raises(UserError, match="no saved rollouts"):
        inspect_run(empty)
