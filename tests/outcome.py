"""What a finished run comes to, but for the time it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from asymgrpo.experiment.store import RunStore

TIMED = ("time/", "step_time", "tokens_per_second", "train_")


def outcome(folder: Path) -> dict[str, Any]:
    """All that must not depend on a cut."""
    store = RunStore(folder)
    metrics = [
        {key: value for key, value in row.items() if not key.startswith(TIMED)}
        for row in store.metrics()
    ]
    weights = next((folder / "final").glob("*.safetensors"))
    return {
        "metrics": metrics,
        "weights": {key: value.tolist() for key, value in load_file(weights).items()},
        "rollouts": {step: store.rollouts(step) for step in store.rollout_steps()},
        "evaluations": store.evaluations(),
    }
