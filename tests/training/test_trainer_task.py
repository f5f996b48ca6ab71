"""`AsymGRPOTrainer(task=...)`: the task gives the rows and the reward, as the command line does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from asymgrpo.errors import UserError
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.settings import make_settings
from asymgrpo.experiment.store import RunStore
from asymgrpo.models import load_policy
from asymgrpo.tasks import load_task
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer
from outcome import TIMED

OWN = """
from asymgrpo.tasks import Grade

class Echo:
    name = "echo"

    def examples(self, split):
        return [{"id": n, "word": f"{split}{n}"} for n in range(12 if split == "train" else 5)]

    def prompt(self, example):
        return f"Say {example['word']}."

    def grade(self, completion, example):
        seen.append(example["word"])
        return Grade(float("a" in completion), completion, "compared")

seen = []
"""
SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "max_steps": 2,
    "seed": 0,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
}


def trainer(folder: Path, task: Any, *, config: dict[str, Any] | None = None, **given: Any) -> Any:
    policy = load_policy("tiny")
    cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = AsymGRPOConfig(str(folder), **SMALL | cpu | (config or {}))
    given = {"processing_class": policy.tokenizer} | given
    return AsymGRPOTrainer(model=policy.model, args=args, task=task, **given)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_run_by_task_is_the_run_of_the_command_line(tmp_path: Path) -> None:
    """Rows, order, prompts and rewards are the same, so every logged number is."""
    enough = {"max_completion_length": 48}
    own = trainer(tmp_path / "own", "arithmetic", config=enough)
    own.train()
    steps = SMALL["max_steps"]
    rest = {key: value for key, value in SMALL.items() if key != "max_steps"} | enough
    settings, _ = make_settings({"steps": steps, **rest})
    train_run(settings, tmp_path / "run")
    rows = RunStore(tmp_path / "run").metrics()
    logged = [row for row in own.state.log_history if "loss" in row]
    assert len(rows) == len(logged) == 2
    assert rows[0]["rewards/correct/std"] > 0
    for one, other in zip(logged, rows, strict=True):
        names = [name for name in other if not name.startswith(TIMED)]
        assert len(names) > 10
        assert {name: one[name] for name in names} == {name: other[name] for name in names}


def test_every_kind_of_task_gives_the_same_rows(file: Path, tmp_path: Path) -> None:
    by_name = trainer(tmp_path / "a", f"{file}:Echo")
    by_object = trainer(tmp_path / "b", load_task(f"{file}:Echo"))
    for found in (by_name, by_object):
        assert found.train_dataset["prompt"] == [f"Say train{n}." for n in range(12)]
        assert found.eval_dataset["prompt"] == [f"Say test{n}." for n in range(5)]
        assert found.train_dataset["word"] == [f"train{n}" for n in range(12)]


def test_evaluation_grades_test_rows(file: Path, tmp_path: Path) -> None:
    found = trainer(
        tmp_path / "a",
        f"{file}:Echo",
        config={"per_device_eval_batch_size": 4, "num_generations_eval": 2},
    )
    seen = load_task(f"{file}:Echo").grade.__func__.__globals__["seen"]
    metrics = found.evaluate()
    assert {word.rstrip("0123456789") for word in seen} == {"test"}
    assert 0 <= metrics["eval_reward"] <= 1
    seen.clear()
    found.train()
    assert {word.rstrip("0123456789") for word in seen} == {"train"}


def test_own_rewards_take_the_place_of_the_grader(file: Path, tmp_path: Path) -> None:
    def lengths(completions: Any, word: Any, **_: Any) -> list[float]:
        assert all(name.startswith("train") for name in word)
        return [float(len(text)) for text in completions]

    found = trainer(tmp_path / "a", f"{file}:Echo", reward_funcs=lengths)
    found.train()
    assert "rewards/lengths/mean" in found.state.log_history[0]
    assert "rewards/correct/mean" not in found.state.log_history[0]


def test_the_tokenizer_is_the_models_own_unless_given(tmp_path: Path) -> None:
    policy = load_policy("tiny")
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    args = AsymGRPOConfig(str(tmp_path / "out"), **SMALL, use_cpu=True, bf16=False)
    found = AsymGRPOTrainer(str(tmp_path / "model"), args=args, task="arithmetic")
    assert found.processing_class.eos_token == policy.tokenizer.eos_token
    assert len(found.train_dataset) == 4  # 2 steps take 1 rollout batch of 16 rollouts


def test_mistakes_are_one_line(file: Path, tmp_path: Path) -> None:
    rows = Dataset.from_dict({"prompt": ["1 + 1"]})
    (tmp_path / "few.py").write_text(OWN.replace("range(12", "range(1"))
    for task, given, says in (
        ("arithmetic", {"train_dataset": rows}, "task and train_dataset both give rows"),
        ("arithmetic", {"eval_dataset": rows}, "task and eval_dataset both give rows"),
        ("arithmetik", {}, "did you mean arithmetic"),
        (f"{file}:Ecko", {}, "has no Ecko; it has Echo"),
        (7, {}, "task is a name, path/file.py:Class or an object with name"),
        (type(load_task(f"{file}:Echo")), {}, "task is a class; make one: task=Echo()"),
        ("arithmetic", {"config": {"max_steps": -1}}, "makes its rows on demand; set max_steps"),
        (f"{tmp_path}/few.py:Echo", {}, "has 1 training rows, but a rollout batch takes 4"),
    ):
        with pytest.raises(UserError) as caught:
            trainer(tmp_path / "x", task, **given)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
