"""Small runs, and all of them that must not depend on a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asymgrpo.experiment.settings import RunSettings
from asymgrpo.models import load_policy

KILLING = Path(__file__).parent / "killing.py"


def small(**changes: Any) -> RunSettings:
    """A run of seconds, with something to lose."""
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
    own: dict[str, Any] = {"algorithm": "sa-ah-abc-grpo", "steps": 6, "sample_groups": 1}
    trainer |= changes.pop("trainer", {})
    return RunSettings(**(own | changes), trainer=trainer)


def with_model(changes: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The changes of an option set, its model made under `folder` where it is not built in."""
    if changes.get("model") != "tiny-bfloat16":
        return dict(changes)
    made = folder / "tiny-bfloat16"
    if not made.exists():
        policy = load_policy("tiny", dtype="bfloat16")
        policy.model.save_pretrained(made)
        policy.tokenizer.save_pretrained(made)
    return {**changes, "model": str(made)}


def words(settings: RunSettings, out: Path) -> list[str]:
    """The command line of a run."""
    own = settings.to_dict()
    found = ["train", "--out", str(out)]
    for key, value in (own | own.pop("trainer")).items():
        if value not in (None, [], ""):
            found += ["--set", f"{key}={json.dumps(value)}"]
    return found


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def kill_often(command: list[str], log: Path, kills: int) -> int:
    """Run the command under `killing.py`; how many runs it took, the uncut one included."""
    done = subprocess.run(
        [sys.executable, str(KILLING), "--kills", str(kills), "--log", str(log), "--", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, log.read_text() if log.exists() else "no log"
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    return int(found["runs"])
