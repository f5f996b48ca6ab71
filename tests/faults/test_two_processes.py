"""Two processes that train together: kills, signals, and going on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import environment, small, words

from asymgrpo.experiment.store import RunStore
from asymgrpo.training.manifest import damage

SCRIPT = Path(__file__).parents[2] / "scripts/kill_runs.py"


def test_two_processes_survive_kills(tmp_path: Path) -> None:
    """Random signals to one process or to both; ends as an uncut run of two."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "3", "--processes", "2", "--seed", "1",
         "--sets", "logging-steps", "--out", str(tmp_path / "kills")],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = tmp_path / "kills/logging-steps/log"
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    assert "   3 kills" in done.stdout


def ranks(launcher: int) -> list[int]:
    """The processes that a launcher started."""
    return list(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


@pytest.mark.parametrize("to", ["rank", "launcher"])
def test_a_signal_stops_both_at_a_step_and_saves(to: str, tmp_path: Path) -> None:
    settings = small(steps=2000, trainer={"save_steps": 10_000})
    command = words(settings, tmp_path / "run")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
         "-m", "asymgrpo.cli", *command],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    store = RunStore(tmp_path / "run")
    deadline = time.monotonic() + 600
    while not store.metrics():
        assert time.monotonic() < deadline, "the run did not get to its first step"
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.02)
    os.kill(launcher.pid if to == "launcher" else ranks(launcher.pid)[1], signal.SIGTERM)
    _, errors = launcher.communicate(timeout=600)
    assert launcher.returncode != 0
    assert store.run()["status"] == "interrupted", errors
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert damage(checkpoint) is None
    assert int(checkpoint.name.rpartition("-")[2]) == store.metrics()[-1]["step"]
    assert "interrupted; the same command goes on from here" in errors
