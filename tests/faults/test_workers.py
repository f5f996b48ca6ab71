"""A comparison whose worker dies, and one that is interrupted."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from runs import environment, small

from asymgrpo.errors import UserError
from asymgrpo.experiment.launch import launch
from asymgrpo.experiment.plan import Job
from asymgrpo.experiment.store import RunStore
from asymgrpo.training.resuming import checkpoints

DYING = '''
import os, pathlib, signal

def once(completions, **kwargs):
    """Kills its own process, the first time it is called at all."""
    mark = pathlib.Path("mark")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]
'''


def test_a_worker_that_dies_is_named_and_the_other_runs_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    settings = small(steps=1, reward=("dying:once",))
    jobs = [
        Job(replace(settings, seed=seed), tmp_path / "runs" / f"seed{seed}", "grpo")
        for seed in (0, 1)
    ]
    quiet = Console(file=io.StringIO())
    with pytest.raises(UserError, match=r"seed0: the worker process died \(exit code -9\); see"):
        launch(jobs, tmp_path / "runs", quiet, at_once=1)
    assert RunStore(jobs[1].folder).run()["status"] == "finished"
    launch(jobs, tmp_path / "runs", quiet, at_once=1)
    assert RunStore(jobs[0].folder).run()["status"] == "finished"


def wait_for_step(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not RunStore(folder).metrics():
        assert process.poll() is None
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)


def test_ctrl_c_lets_the_run_in_hand_save_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    words = ["compare", "--algorithms", "grpo", "--seeds", "1", "--steps", "500", "--out", str(out),
             "--eval-every", "0", "--set", "per_device_train_batch_size=8", "--set",
             "num_generations=4", "--set", "steps_per_generation=2"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "asymgrpo.cli", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    run = out / "grpo-seed0"
    wait_for_step(run, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it has in front
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"interrupted; the same command goes on from here" in errors
    assert RunStore(run).run()["status"] == "interrupted"
    (saved,) = checkpoints(run)
    assert f"checkpoint-{RunStore(run).metrics()[-1]['step']}" == saved.name
