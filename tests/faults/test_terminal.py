"""What a person sees while a run goes on, whatever the numbers and the names are."""

from __future__ import annotations

import io
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from runs import environment, small, words

from asymgrpo import cli
from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.settings import RunSettings
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


OLD = Path(__file__).parents[1] / "fixtures/run-format-1"
NAMES = {"markup": "[x]", "wrong markup": "[/x] [link=a]b", "escape": "a\x1b[2J\x1b]0;b\x07c"}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_are_printed_as_they_are(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in `--out` are no markup, and an escape sequence does not reach the terminal."""
    folder, shown = NAMES[name], NAMES[name].replace("\x1b", "<U+001B>").replace("\x07", "<U+0007>")
    shutil.copytree(OLD, folder)
    settings = RunSettings.from_dict(RunStore(folder).run()["settings"])
    few = ["--problems", "1", "--samples", "1", "--k", "1"]
    for arguments, told in {
        ("report", folder, "--out", f"{folder}/page.html"): f"wrote {shown}/page.html",
        ("evaluate", folder, *few): f"wrote {shown}/evaluations",
        ("inspect", folder): "sa-ah-grpo",
        tuple(words(settings, Path(folder))): f"wrote {shown} (4 steps",
    }.items():
        text = in_terminal(list(arguments), monkeypatch)
        assert told in text
        assert "\x1b[2J" not in text
        assert "\x07" not in text
    capsys.readouterr()
    RunStore(folder).update_run(status="running")
    other = replace(settings, seed=5)
    monkeypatch.setattr(sys, "argv", ["asymgrpo", *words(other, Path(folder))])
    with pytest.raises(SystemExit):
        cli.main()
    errors = capsys.readouterr().err
    assert f"asymgrpo: {shown} holds another run (seed 0, not 5)" in errors
    assert "\x1b" not in errors


@pytest.mark.parametrize("arguments", [["inspect", str(OLD)], ["algorithms"]], ids=["run", "all"])
def test_a_terminal_that_has_only_ascii(arguments: list[str], tmp_path: Path) -> None:
    ascii_only = environment(LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = subprocess.run(
        [sys.executable, "-m", "asymgrpo.cli", *arguments],
        cwd=tmp_path, env=ascii_only, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
    assert done.stdout.isascii()
    if arguments[0] == "inspect":
        assert b"rollout 0 . reward" in done.stdout
