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
    (path,) = (run / "evaluations").glob("evaluate-arithmetic-test-*.json")
    written = json.loads(path.read_text())
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
        (["train", "--engine", "vllm"], "pip install 'asymgrpo[vllm]'"),
        (["train", "--engine", "warp"], "engine must be one of native, transformers, vllm"),
        (["train", "--scorer", "loose"], "scorer must be one of packed, padded"),
        (["train", "--report-to", "wandb"], "pip install wandb"),
        (["train", "--report-to", "trackio"], "pip install trackio"),
        (["train", "--report-to", "tensorbord"], "did you mean tensorboard"),
        (["train", "--prompt", "no place"], "has no {question}"),
        (["train", "--steps", "0"], "steps must be at least 1"),
        (["train", "--seed", "-1"], "seed must be at least 0"),
        (["train", "--lora", "-1"], "lora must be at least 0"),
        (["train", "--eval-every", "-1"], "eval_every must be at least 0"),
        (["train", "--set", "temperature=-1"], "temperature must be above 0"),
        (["train", "--set", "top_p=2"], "top_p must be in"),
        (["train", "--set", "learning_rate=-1"], "learning_rate must be at least 0"),
        (["train", "--set", "learning_rate=.nan"], "learning_rate must be at least 0"),
        (["train", "--set", "num_generations=1"], "num_generations must be at least 2"),
        (["train", "--set", "per_device_train_batch_size=0"], "must be at least 1"),
        (["train", "--set", "max_completion_length=0"], "must be at least 1"),
        (["train", "--set", "save_steps=0"], "save_steps must be above 0"),
        (["train", "--set", "lr_scheduler_type=steep"], "steep"),
        (["train", "--set", "optim=sideways"], "sideways"),
        (["evaluate", "tiny", "--temperature", "-1"], "--temperature must be at least 0"),
        (["evaluate", "tiny", "--temperature", "nan"], "--temperature must be at least 0"),
        (["evaluate", "tiny", "--temperature", "0", "--top-p", "0.9"], "--top-p does nothing"),
        (["evaluate", "tiny", "--temperature", "0", "--top-k", "9"], "--top-k does nothing"),
        (["evaluate", "tiny", "--temperature", "0", "--min-p", "0.1"], "--min-p does nothing"),
        (["evaluate", "tiny", "--temperature", "0", "--samples", "8"], "leave out --samples"),
        (["evaluate", "tiny", "--temperature", "0", "--k", "4"], "at least as many --samples"),
        (["evaluate", "tiny", "--top-p", "0"], "top_p must be in"),
        (["evaluate", "tiny", "--top-p", "nan"], "top_p must be in"),
        (["evaluate", "tiny", "--top-k", "-1"], "top_k must be 0 (off) or positive"),
        (["evaluate", "tiny", "--min-p", "1.5"], "min_p must be in"),
        (["evaluate", "tiny", "--repetition-penalty", "0"], "repetition_penalty must be above 0"),
        (["evaluate", "tiny", "--repetition-penalty", "inf"], "repetition_penalty must be above"),
        (["evaluate", "tiny", "--stop", ""], "stop strings must not be empty"),
        (["evaluate", "tiny", "--stop", "<eos>"], "is a special token"),
        (["evaluate", "tiny", "--cluster", "family"], "no column family to group related"),
        (["evaluate", "tiny", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["evaluate", "tiny", "--samples", "0"], "--samples must be at least 1"),
        (["evaluate", "tiny", "--problems", "0"], "--problems must be at least 1"),
        (["evaluate", "tiny", "--seed", "-1"], "--seed must be at least 0"),
        (["evaluate", "tiny", "--engine", "warp"], "no engine named 'warp'"),
        (["evaluate", "tiny", "--split", "middle"], "middle"),
        (["evaluate", "tiny", "--prompt", "no place"], "has no {question}"),
        (["compare", "--seeds", "many"], "--seeds takes how many"),
        (["compare", "--seeds", "0"], "one or more unlike seeds"),
        (["compare", "--at-once", "0"], "--at-once must be at least 1"),
        (["compare", "--set", "seed=3"], "use --seeds"),
        (["inspect", ".", "--limit", "0"], "--limit must be at least 1"),
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
