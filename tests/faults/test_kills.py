"""SIGKILL at random moments: the same command, started again, ends as if nothing had been.

ASYMGRPO_KILLS=30 kills that often; fewer kills cost less time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from runs import kill_often, small, words

from outcome import outcome

KILLS = int(os.environ.get("ASYMGRPO_KILLS", "4"))
SMALL = ["--set", "per_device_train_batch_size=8", "--set", "num_generations=4",
         "--set", "steps_per_generation=2", "--set", "max_completion_length=24",
         "--set", "eval_problems=4", "--set", "eval_samples=2", "--set", "save_steps=1",
         "--set", "learning_rate=1e-3"]  # fmt: skip


def leftovers(folder: Path) -> list[str]:
    """What only a half-done write leaves."""
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


def test_training_killed_at_random_moments(tmp_path: Path) -> None:
    settings = small(eval_every=3, eval_problems=4, eval_samples=2)
    runs = kill_often(words(settings, tmp_path / "{}"), tmp_path / "log", KILLS)
    expected = outcome(tmp_path / "0")
    assert sum(row["grad_norm"] > 0 for row in expected["metrics"]) >= 3
    for run in range(1, runs):
        found = outcome(tmp_path / str(run))
        for part in expected:
            assert found[part] == expected[part], (part, run)
        assert leftovers(tmp_path / str(run)) == []
    print(f"{KILLS} kills over {runs - 1} runs")


def test_a_comparison_killed_with_its_workers_at_work(tmp_path: Path) -> None:
    out = tmp_path / "{}"
    command = ["compare", "--algorithms", "grpo,sa-ah-grpo", "--seeds", "1", "--steps", "2",
               "--eval-every", "2", "--at-once", "1", "--out", str(out), *SMALL]  # fmt: skip
    runs = kill_often(command, tmp_path / "log", 1)
    for run in range(1, runs):
        for name in ("grpo-seed0", "sa-ah-grpo-seed0"):
            assert outcome(tmp_path / str(run) / name) == outcome(tmp_path / "0" / name)
        found, expected = (
            json.loads((tmp_path / each / "comparison.json").read_text())
            for each in (str(run), "0")
        )
        assert without_times(found) == without_times(expected)
        assert (tmp_path / str(run) / "report.html").is_file()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("seconds", "date")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_an_evaluation_killed_at_random_moments(tmp_path: Path) -> None:
    command = ["evaluate", "tiny", "--problems", "12", "--samples", "64", "--k", "1,2",
               "--max-new-tokens", "24", "--out", str(tmp_path / "{}.json")]  # fmt: skip
    runs = kill_often(command, tmp_path / "log", 3)
    expected = json.loads((tmp_path / "0.json").read_text())
    for run in range(1, runs):
        found = json.loads((tmp_path / f"{run}.json").read_text())
        assert without_times(found) == without_times(expected)
        assert not (tmp_path / f"{run}.partial.jsonl").exists()


def test_killed_between_the_last_checkpoint_and_the_end(tmp_path: Path) -> None:
    """Nothing is left to train then, and nothing is trained."""
    from asymgrpo.experiment.run import train_run

    settings, folder = small(), tmp_path / "run"
    store = train_run(settings, folder)
    expected = outcome(folder)
    store.update_run(status="running")
    for path in (folder / "final").iterdir():
        path.unlink()
    train_run(settings, folder)
    assert outcome(folder) == expected
