"""What a run reads, changed between its cut and its going on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.errors import UserError
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.models import load_policy
from asymgrpo.models.model_sources import BUILT_IN

REWARD = "def short(completions, **_):\n    return [-len(str(c)) for c in completions]\n"
TASK = "from asymgrpo.tasks.arithmetic import ArithmeticTask\nclass Own(ArithmeticTask): pass\n"


def write_inputs(folder: Path) -> dict[str, Any]:
    """A run's data, base model and own code; the settings that name them."""
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(3) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "task.py").write_text(TASK)
    shutil.copytree(BUILT_IN["tiny"], folder / "model")
    return {"model": str(folder / "model"), "reward": (f"{folder}/reward.py:short",), "lora": 2}


def edit_rows(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text(path.read_text().replace('"4"', '"5"'))


def replace_model(folder: Path) -> None:
    model = load_policy(str(folder / "model")).model
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
    model.save_pretrained(folder / "model")


def edit_reward(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD.replace("-len", "len"))


def edit_task(folder: Path) -> None:
    (folder / "task.py").write_text(TASK + "    # another\n")


@pytest.mark.parametrize(
    ("task", "edit", "name"),
    [
        ("jsonl:{}/rows.jsonl", edit_rows, "rows.jsonl"),
        ("jsonl:{}/rows.jsonl", replace_model, "model/"),
        ("jsonl:{}/rows.jsonl", edit_reward, "reward.py"),
        ("{}/task.py:Own", edit_task, "task.py"),
    ],
    ids=["data", "base-model", "reward", "task"],
)
def test_a_changed_input_is_one_line(
    task: str, edit: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    given = write_inputs(tmp_path)
    batch = {"per_device_train_batch_size": 4, "steps_per_generation": 1}
    settings = small(steps=1, task=task.format(tmp_path), trainer=batch, **given)
    store = train_run(settings, tmp_path / "run")
    store.update_run(status="running")
    train_run(settings, tmp_path / "run").update_run(status="running")  # nothing has changed
    edit(tmp_path)
    with pytest.raises(UserError, match="restore it to go on, or choose another --out") as refused:
        train_run(settings, tmp_path / "run")
    assert name in str(refused.value)
    assert store.run()["status"] == "running"


def test_sittings_are_a_history(tmp_path: Path) -> None:
    store = train_run(small(steps=1), tmp_path / "run")
    first = store.run()
    old = {"torch": "0.1"}
    first["sittings"][0]["versions"] = first["versions"] = old
    store.write_run(first | {"status": "running", "created": "2001-01-01T00:00:00+00:00"})
    train_run(small(steps=1), tmp_path / "run")
    record = RunStore(tmp_path / "run").run()
    assert (record["created"], record["versions"]) == ("2001-01-01T00:00:00+00:00", old)
    assert [each["versions"]["torch"] for each in record["sittings"]] == ["0.1", torch.__version__]
    assert {"date", "versions", "machine"} <= set(record["sittings"][-1])
