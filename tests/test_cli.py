"""The commands as a user types them: what they print, and one line for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asymgrpo import ALGORITHMS, cli
from asymgrpo.errors import UserError

SMALL = [
    *("--set", "per_device_train_batch_size=8", "--set", "num_generations=4"),
    *("--set", "steps_per_generation=2", "--set", "max_completion_length=24"),
    *("--set", "eval_problems=4", "--set", "eval_samples=2", "--set", "report_to=none"),
]


def call(*words: str) -> str:
    """What a command prints; raises what it raises."""
    result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=300))


def test_algorithms_lists_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    cli.algorithms()
    printed = capsys.readouterr().out
    for name, preset in ALGORITHMS.items():
        assert name in printed
        assert preset.paper in printed


def test_train_then_inspect_then_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["train", "--algorithm", "sa-ah-grpo", "--steps", "2", "--out", str(run), *SMALL]
    with capsys.disabled():
        output = call(*words, "--eval-every", "2", "--set", "alpha=0.25")
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["label"] == "sa-ah-grpo alpha=0.25"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "final" / "model.safetensors").is_file()
    assert output is not None
    again = (run / "run.json").read_bytes()
    call(*words, "--eval-every", "2", "--set", "alpha=0.25")  # finished: nothing is done again
    assert (run / "run.json").read_bytes() == again
    with pytest.raises(UserError, match="holds another run"):
        call(*words, "--eval-every", "2", "--set", "alpha=0.5")
    call("inspect", str(run))
    call("report", str(run), "--out", str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size > 1000
    call("evaluate", str(run), "--samples", "2", "--k", "1,2", "--problems", "3",
         "--max-new-tokens", "24")  # fmt: skip
    written = json.loads((run / "evaluations" / "evaluate-arithmetic-test.json").read_text())
    assert len(written["problems"]) == 3


def test_compare_runs_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "comparison"
    words = ["compare", "--algorithms", "grpo,abc-grpo", "--seeds", "1", "--steps", "2",
             "--eval-every", "2", "--at-once", "1", "--out", str(out), *SMALL]  # fmt: skip
    call(*words)
    records = {path.parent.name: path for path in out.glob("*/run.json")}
    assert set(records) == {"grpo-seed0", "abc-grpo-seed0"}
    assert (out / "report.html").is_file()
    labels = json.loads((out / "comparison.json").read_text())["labels"]
    assert {entry["label"] for entry in labels} == {"grpo", "abc-grpo"}
    stamp = records["grpo-seed0"].read_bytes()
    call(*words)
    assert records["grpo-seed0"].read_bytes() == stamp


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--algorithm", "grppo"], "did you mean grpo"),
        (["train", "--task", "gsm9k"], "gsm8k"),
        (["train", "--model", "tinny", "--task", "arithmetic"], "tiny"),
        (["train", "--set", "alhpa=1"], "did you mean alpha"),
        (["train", "--set", "alpha=-1"], "alpha must be at least 0"),
        (["train", "--set", "eps1=-0.1"], "eps1 must be at least 0"),
        (["train", "--set", "num_generations=3"], "divisible by num_generations"),
        (["train", "--config", "none.yaml"], "no recipe at none.yaml"),
        (["train", "--task", "gsm8k", "--task-path", "none.jsonl"], "none.jsonl"),
        (["train", "--reward", "nowhere:nothing"], "cannot be imported"),
        (["train", "--out", "."], "holds no run"),
        (["evaluate", "tiny", "--k", "1,x"], "--k takes whole numbers"),
        (["evaluate", "tiny", "--k", "8", "--samples", "2"], "needs at least as many --samples"),
        (["report", "."], "."),
        (["inspect", "."], "holds no run"),
        (["compare", "--sweep", "alpha"], "--sweep takes field=value"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "something").write_text("there")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        call(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]  # nothing half-written


def test_a_mistake_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "asymgrpo.cli", "train", "--algorithm", "grppo"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("asymgrpo: unknown algorithm 'grppo'; did you mean grpo")
    assert process.stderr.count("\n") == 1
