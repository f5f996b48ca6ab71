"""The same command with more steps goes on from the last checkpoint."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from runs import small

from asymgrpo.errors import UserError
from asymgrpo.experiment.launch import finished
from asymgrpo.experiment.plan import plan
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from outcome import outcome


def finite(folder: Path, steps: int, **trainer: Any) -> RunSettings:
    """A run over a data set that is read more than once."""
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(4)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return small(task=f"jsonl:{data}", steps=steps, trainer={"logging_steps": 2, **trainer})


@pytest.mark.parametrize(
    "schedule",
    [{}, {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}],
    ids=["constant", "warm-up"],
)
def test_an_extended_run_equals_an_uncut_longer_one(
    schedule: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_run(finite(tmp_path, 3, **schedule), tmp_path / "run")
    train_run(finite(tmp_path, 5, **schedule), tmp_path / "run")
    assert "schedule" not in capsys.readouterr().out
    train_run(finite(tmp_path, 5, **schedule), tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    record = RunStore(tmp_path / "run").run()
    assert (record["steps"], record["settings"]["steps"], record["status"]) == (5, 5, "finished")


@pytest.mark.parametrize(
    "schedule",
    [{"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "cosine"},
     {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}],
    ids=["linear", "cosine", "warm-up-share"],
)  # fmt: skip
def test_a_schedule_that_depends_on_the_steps_is_said(
    schedule: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = (finite(tmp_path, n, logging_steps=1, **schedule) for n in (2, 4))
    train_run(short, tmp_path / "run")
    train_run(long, tmp_path / "run")
    said = capsys.readouterr().out
    assert "extended from 2 to 4 steps: the schedule " in said
    train_run(long, tmp_path / "whole")
    rates = [[row["learning_rate"] for row in RunStore(tmp_path / name).metrics()][2:]
             for name in ("run", "whole")]  # fmt: skip
    assert rates[0] == rates[1]  # from the third step on, the longer schedule's own


def test_endless_prompts_are_said_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generated task draws its prompts by the number of steps."""
    train_run(small(steps=1), tmp_path / "run")
    train_run(small(steps=2), tmp_path / "run")
    assert "arithmetic draws its prompts by the number of steps" in capsys.readouterr().out
    assert [row["step"] for row in RunStore(tmp_path / "run").metrics()] == [1, 2]


def test_fewer_steps_are_another_run(tmp_path: Path) -> None:
    train_run(small(steps=2), tmp_path / "run")
    with pytest.raises(UserError, match=r"holds another run \(steps 2, not 1\); choose"):
        train_run(small(steps=1), tmp_path / "run")


def test_a_finished_run_without_a_checkpoint_is_kept(tmp_path: Path) -> None:
    settings = small(steps=1, trainer={"save_strategy": "no"})
    train_run(settings, tmp_path / "run")
    before = outcome(tmp_path / "run")
    with pytest.raises(UserError, match="holds no whole checkpoint to go on from"):
        train_run(replace(settings, steps=2), tmp_path / "run")
    assert outcome(tmp_path / "run") == before
    assert RunStore(tmp_path / "run").run()["status"] == "finished"
    train_run(settings, tmp_path / "run")  # still the run that it was


def test_folders_do_not_depend_on_the_steps(tmp_path: Path) -> None:
    assert small(steps=2).default_name == small(steps=3).default_name
    assert small(steps=2).default_name != small(steps=2, lora=4).default_name


def test_a_comparison_extends_its_runs(tmp_path: Path) -> None:
    shared = {"report_to": "none", **small().trainer}
    for steps, done in ((1, False), (1, True), (2, False)):
        (job,) = plan(["grpo"], 1, {}, {**shared, "steps": steps}, tmp_path)
        assert finished(job) is done
        train_run(job.settings, job.folder)
