"""What a person sees while a run goes on, whatever the numbers and the names are."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from runs import small, words

from asymgrpo import cli
from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.store import RunStore

REWARDS = """
def nothing(completions, **kwargs):
    return [None for _ in completions]

def huge(completions, **kwargs):
    return [1e39 * (place % 2) for place, _ in enumerate(completions)]

def some(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""


def in_terminal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, width: int = 200) -> str:
    """What a command writes to a terminal; it ends well."""
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, force_terminal=True, width=width))
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, out.getvalue()
    return out.getvalue()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shown_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("reward", ["nothing", "huge", "some"])
def test_the_progress_bar_outlasts_numbers_that_are_missing_or_not_finite(
    reward: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards that are all None or beyond float32, and a loss that is no number."""
    if reward == "some":
        original = run_module.AsymGRPOTrainer._compute_loss

        def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) * (math.nan if self.state.global_step else 1.0)

        monkeypatch.setattr(run_module.AsymGRPOTrainer, "_compute_loss", spoilt)
    settings = small(steps=2, reward=(f"shown_rewards:{reward}",))
    shown = in_terminal(words(settings, here / "run"), monkeypatch)
    assert "2/2" in shown
    assert "entropy" in shown
    assert "wrote run" in shown.replace(str(here) + "/", "")
    assert RunStore(here / "run").run()["status"] == "finished"
