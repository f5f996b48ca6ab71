"""SIGKILL at random moments: the same command, started again, ends as if nothing had been.

ASYMGRPO_KILLS=30 kills that often; fewer kills cost less time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import kill_often, outcome, small, words

from asymgrpo.experiment.store import RunStore

KILLS = int(os.environ.get("ASYMGRPO_KILLS", "4"))
SMALL = ["--set", "per_device_train_batch_size=8", "--set", "num_generations=4",
         "--set", "steps_per_generation=2", "--set", "max_completion_length=24",
         "--set", "eval_problems=4", "--set", "eval_samples=2", "--set", "save_steps=1",
         "--set", "learning_rate=1e-3"]  # fmt: skip


def uncut(command: list[str], log: Path) -> None:
    assert kill_often(command, log, kills=0, seed=0, longest=1) == 0


def leftovers(folder: Path) -> list[str]:
    """What only a half-done write leaves."""
    return [p.name for p in folder.rglob(".*") if p.name != ".lock"]


def test_training_killed_at_random_moments(tmp_path: Path) -> None:
    settings = small(eval_every=3, eval_problems=4, eval_samples=2)
    uncut(words(settings, tmp_path / "whole"), tmp_path / "whole.log")
    expected = outcome(tmp_path / "whole")
    assert sum(row["grad_norm"] > 0 for row in expected["metrics"]) >= 3
    # As long as a run takes when nothing holds it up, so that no part of it is spared.
    longest = 1.2 * RunStore(tmp_path / "whole").run()["seconds"] + 0.5
    kills, tries = 0, 0
    while kills < KILLS:
        folder = tmp_path / f"cut-{tries}"
        kills += kill_often(words(settings, folder), tmp_path / "cut.log",
                            kills=KILLS - kills, seed=tries, longest=longest)  # fmt: skip
        found = outcome(folder)
        for part in expected:
            assert found[part] == expected[part], (part, tries)
        assert leftovers(folder) == []
        tries += 1
    print(f"{kills} kills over {tries} runs")


def test_a_comparison_killed_with_its_workers_at_work(tmp_path: Path) -> None:
    def command(out: Path) -> list[str]:
        return ["compare", "--algorithms", "grpo,sa-ah-grpo", "--seeds", "1", "--steps", "3",
                "--eval-every", "3", "--at-once", "1", "--out", str(out), *SMALL]  # fmt: skip

    uncut(command(tmp_path / "whole"), tmp_path / "whole.log")
    kills = kill_often(command(tmp_path / "cut"), tmp_path / "cut.log",
                       kills=2, seed=1, longest=25)  # fmt: skip
    assert kills > 0
    for name in ("grpo-seed0", "sa-ah-grpo-seed0"):
        assert outcome(tmp_path / "cut" / name) == outcome(tmp_path / "whole" / name)
    found, expected = (json.loads((tmp_path / run / "comparison.json").read_text())
                       for run in ("cut", "whole"))  # fmt: skip
    assert without_seconds(found) == without_seconds(expected)
    assert (tmp_path / "cut" / "report.html").is_file()


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if k != "seconds"}
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


def test_an_evaluation_killed_at_random_moments(tmp_path: Path) -> None:
    def command(out: Path) -> list[str]:
        return ["evaluate", "tiny", "--problems", "12", "--samples", "64", "--k", "1,2",
                "--max-new-tokens", "24", "--out", str(out)]  # fmt: skip

    uncut(command(tmp_path / "whole.json"), tmp_path / "whole.log")
    kills = kill_often(command(tmp_path / "cut.json"), tmp_path / "cut.log",
                       kills=3, seed=2, longest=4)  # fmt: skip
    assert kills > 0
    assert json.loads((tmp_path / "cut.json").read_text()) == json.loads(
        (tmp_path / "whole.json").read_text()
    )
    assert not (tmp_path / "cut.partial.jsonl").exists()


@pytest.mark.parametrize("steps", [6])
def test_killed_between_the_last_checkpoint_and_the_end(tmp_path: Path, steps: int) -> None:
    """Nothing is left to train then, and nothing is trained."""
    from asymgrpo.experiment.run import train_run

    settings, folder = small(steps=steps), tmp_path / "run"
    store = train_run(settings, folder)
    expected = outcome(folder)
    store.update_run(status="running")
    for path in (folder / "final").iterdir():
        path.unlink()
    train_run(settings, folder)
    assert outcome(folder) == expected
