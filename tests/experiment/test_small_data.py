"""A data set smaller than a rollout batch is an error, and no run ends before its last step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asymgrpo.errors import UserError
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import make_settings


def write_rows(path: Path, count: int) -> Path:
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("per_device", [128, 16])
def test_fewer_rows_than_a_rollout_batch(per_device: int, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "seven.jsonl", 7)
    layer = {"task": f"jsonl:{rows}", "steps": 2, "max_completion_length": 8, "report_to": "none"}
    layer |= {"per_device_train_batch_size": per_device, "prompt": "{question}"}
    settings, _ = make_settings(layer)
    with pytest.raises(UserError, match="7 training rows") as caught:
        train_run(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    advice = re.search(r"per_device_train_batch_size=(\d+)", str(caught.value))
    assert advice is not None
    settings, _ = make_settings(layer | {"per_device_train_batch_size": int(advice[1])})
    store = train_run(settings, tmp_path / "run")  # the advice works
    assert [row["step"] for row in store.metrics()] == [1, 2]
    assert store.run()["status"] == "finished"


def test_a_trainer_that_stops_early_does_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asymgrpo.training.trl import AsymGRPOTrainer

    monkeypatch.setattr(AsymGRPOTrainer, "train", lambda self, **_: None)
    settings, _ = make_settings({"steps": 2, "report_to": "none"})
    with pytest.raises(UserError, match="stopped after 0 of 2 steps"):
        train_run(settings, tmp_path / "run")
