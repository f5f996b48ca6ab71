"""A run that is cut and continued ends as one that never was: bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from asymgrpo.training.resuming import checkpoints
from outcome import outcome


class Cut(Exception):
    """Stands for the power cut."""


def small(**changes: Any) -> RunSettings:
    trainer = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "steps_per_generation": 2,
        "max_completion_length": 32,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_steps": 2,
    }
    own = {"algorithm": "sa-ah-abc-grpo", "steps": 7, "eval_every": 3, "eval_problems": 4}
    own |= {"eval_samples": 2, "sample_groups": 1}
    trainer |= changes.pop("trainer", {})
    return RunSettings(**(own | changes), trainer=trainer)


def cut_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the trainer die in the middle of the step after `step`."""
    original = run_module.AsymGRPOTrainer.training_step

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= step:
            raise Cut
        return original(self, *args, **kwargs)

    monkeypatch.setattr(run_module.AsymGRPOTrainer, "training_step", dying)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_run(small(), folder)
    found = outcome(folder)
    assert sum(row["grad_norm"] > 0 for row in found["metrics"]) >= 4  # there is something to lose
    return found


def test_the_same_settings_twice_give_the_same_run(whole: dict[str, Any], tmp_path: Path) -> None:
    train_run(small(), tmp_path / "again")
    assert outcome(tmp_path / "again") == whole


@pytest.mark.parametrize("steps", [(1,), (3,), (4,), (2, 5)], ids=str)
def test_cut_and_continued(
    steps: tuple[int, ...],
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut before any checkpoint, between two, in the middle of a rollout batch, and twice."""
    folder = tmp_path / "run"
    for step in steps:
        with monkeypatch.context() as patch:
            cut_after(patch, step)
            with pytest.raises(Cut):
                train_run(small(), folder)
        assert RunStore(folder).run()["status"] == "failed"
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 99, "rew')  # a line torn by the cut
    train_run(small(), folder)
    found = outcome(folder)
    for part in whole:
        assert found[part] == whole[part], part


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lora": 4}, id="lora"),
        pytest.param({"trainer": {"num_iterations": 2}}, id="two-iterations"),
        pytest.param(
            {"trainer": {"use_adaptive_entropy": True, "entropy_target": 9.0}}, id="adaptive"
        ),
        pytest.param({"engine": "transformers", "scorer": "padded"}, id="trls-own-paths"),
    ],
)
def test_other_settings_resume_too(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(**changes)
    train_run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        cut_after(patch, 5)
        with pytest.raises(Cut):
            train_run(settings, tmp_path / "cut")
    train_run(settings, tmp_path / "cut")
    found, expected = outcome(tmp_path / "cut"), outcome(tmp_path / "whole")
    for part in expected:
        assert found[part] == expected[part], part


def test_the_order_of_later_epochs_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finite set that is read more than once is shuffled anew each time."""
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = small(
        task=f"jsonl:{data}", steps=9, eval_every=0, trainer={"per_device_train_batch_size": 16}
    )
    train_run(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        cut_after(patch, 7)
        with pytest.raises(Cut):
            train_run(settings, tmp_path / "cut")
    train_run(settings, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_checkpoint_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any]
) -> None:
    """Dying inside the write leaves the one before it, and no half of the new one."""
    folder = tmp_path / "run"
    original = run_module.AsymGRPOTrainer._save_rng_state

    def dying(self: Any, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise Cut
        original(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(run_module.AsymGRPOTrainer, "_save_rng_state", dying)
        with pytest.raises(Cut):
            train_run(small(), folder)
    assert [path.name for path in checkpoints(folder)] == ["checkpoint-2"]
    train_run(small(), folder)
    assert outcome(folder) == whole


def command(folder: Path) -> list[str]:
    settings = small()
    words = [sys.executable, "-m", "asymgrpo.cli", "train", "--out", str(folder)]
    own = settings.to_dict()
    trainer = own.pop("trainer")
    for key, value in (own | trainer).items():
        if value not in (None, [], ""):
            words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        rows = RunStore(folder).metrics() if folder.exists() else []
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.02)
    pytest.fail("the run did not get to its step")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_real_signal_to_a_real_process(
    number: signal.Signals, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command(folder), env=environment, stderr=subprocess.PIPE)
    wait_for_step(folder, 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert b"interrupted; the same command goes on from here" in errors
        assert RunStore(folder).run()["status"] == "interrupted"
    again = subprocess.run(command(folder), env=environment, capture_output=True, check=True)
    assert b"going on from" in again.stdout
    found = outcome(folder)
    for part in whole:
        assert found[part] == whole[part], part
