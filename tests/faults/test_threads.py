"""The number of threads is part of what makes a result: fixed by the plan, kept, and told of."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.errors import UserError
from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.launch import launch, worker_environments
from asymgrpo.experiment.plan import Job
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore

FAILING = '''
import pathlib

def once(completions, **kwargs):
    """Fails the first time it is called at all."""
    if not pathlib.Path("mark").exists():
        pathlib.Path("mark").touch()
        raise OSError("the first call fails")
    return [float(len(text)) for text in completions]
'''


def comparison(settings: RunSettings, out: Path) -> list[Job]:
    return [Job(replace(settings, seed=s), out / f"seed{s}", "grpo") for s in (0, 1)]


def threads(jobs: list[Job]) -> list[int]:
    return [RunStore(job.folder).run()["machine"]["threads"] for job in jobs]


def test_a_restarted_comparison_has_the_threads_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    (tmp_path / "failing.py").write_text(FAILING)
    jobs = comparison(small(steps=1, reward=("failing:once",)), tmp_path / "runs")
    quiet = Console(file=io.StringIO())
    with pytest.raises(UserError, match="the first call fails"):
        launch(jobs, tmp_path / "runs", quiet)
    launch(jobs, tmp_path / "runs", quiet)  # one is missing, and could have both cores
    assert threads(jobs) == [1, 1]


def test_the_user_s_own_number_of_threads_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    jobs = comparison(small(), tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (found,) = worker_environments(jobs, 1, tmp_path, at_once=1)
    assert found["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    (again,) = worker_environments(jobs, 1, tmp_path, at_once=1)
    assert again["OMP_NUM_THREADS"] == "3"  # the comparison goes on as it began


class Cut(Exception):
    """Stands for the power cut."""


def test_a_run_that_goes_on_with_other_threads_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, and as a worker's run of a comparison; without a change there is no such line."""
    jobs = comparison(small(steps=3), tmp_path / "runs")
    original = run_module.AsymGRPOTrainer.training_step

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= 2:
            raise Cut
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run_module.AsymGRPOTrainer, "training_step", dying)
        for job in jobs:
            for _ in range(2):
                with pytest.raises(Cut):
                    train_run(job.settings, job.folder)
    now = torch.get_num_threads()
    assert "other than before" not in capsys.readouterr().out
    machine = RunStore(jobs[0].folder).run()["machine"]
    assert machine["threads"] == now
    assert machine["cpu"] and machine["vector"] and machine["code"]  # noqa: PT018
    told = f"other than before: threads {now + 7}, now {now}; the result can differ"
    for job in jobs:  # as if they had begun with more
        RunStore(job.folder).update_run(machine=machine | {"threads": now + 7})
    train_run(jobs[0].settings, jobs[0].folder)
    assert capsys.readouterr().out.count(told) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(now))
    shown = io.StringIO()
    launch(jobs, tmp_path / "runs", Console(file=shown, width=300))
    assert shown.getvalue().count(f"seed1: {told}") == 1
