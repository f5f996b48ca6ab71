"""Under every option that keeps something between steps, a run cut after every step is exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from option_sets import OPTION_SETS
from runs import small, with_model

from asymgrpo.errors import UserError
from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.callbacks import ConstantReward
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.training.resuming import callback_state
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer
from outcome import outcome


class Cut(Exception):
    """Stands for the power cut."""


@pytest.mark.parametrize("name", OPTION_SETS)
def test_cut_after_every_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = with_model(OPTION_SETS[name], tmp_path)
    trainer = {"save_steps": 1, **changes.pop("trainer", {})}
    settings = small(steps=4, trainer=trainer, **changes)
    train_run(settings, tmp_path / "whole")
    original = run_module.AsymGRPOTrainer.training_step
    for last in range(1, 4):

        def dying(self: Any, *args: Any, last: int = last, **kwargs: Any) -> Any:
            if self.state.global_step >= last:
                raise Cut
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(run_module.AsymGRPOTrainer, "training_step", dying)
            with pytest.raises(Cut):
                train_run(settings, tmp_path / "cut")
        assert (tmp_path / f"cut/checkpoint-{last}").is_dir()
    train_run(settings, tmp_path / "cut")
    found, expected = outcome(tmp_path / "cut"), outcome(tmp_path / "whole")
    assert any(row["grad_norm"] > 0 for row in expected["metrics"])
    for part in expected:
        assert found[part] == expected[part], part
    counted = [row["step"] for row in RunStore(tmp_path / "cut").metrics()]
    assert counted == sorted(set(counted))


@pytest.mark.parametrize("name", ["save_only_model", "ignore_data_skip"])
def test_settings_that_make_a_cut_inexact_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name}=true makes a run that was cut end otherwise"):
        train_run(small(trainer={name: True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_counts_of_callbacks_survive(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import EarlyStoppingCallback

    from small import make_model, make_tokenizer

    def made() -> Any:
        config = AsymGRPOConfig(
            str(tmp_path), max_steps=2, save_steps=1, logging_steps=1, report_to="none",
            use_cpu=True, bf16=False, per_device_train_batch_size=2, num_generations=2,
            max_completion_length=4, log_completions=True,
            engine="transformers", eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
            metric_for_best_model="eval_reward", num_generations_eval=2,
            per_device_eval_batch_size=2,
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": ["a b", "b c"]})
        return AsymGRPOTrainer(
            model=make_model(), args=config, processing_class=make_tokenizer(),
            reward_funcs=lambda completions, **_: [0.5] * len(completions),
            train_dataset=data, eval_dataset=data,
            callbacks=[EarlyStoppingCallback(9), ConstantReward()],
        )  # fmt: skip

    first, again = made(), made()
    first.train()
    counts = {type(c).__name__: callback_state(c) for c in first.callback_handler.callbacks}
    assert counts["EarlyStoppingCallback"] == {"early_stopping_patience_counter": 1}
    assert counts["ConstantReward"] == {"batches": 2, "warned": False}
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert {
        type(c).__name__: callback_state(c)
        for c in again.callback_handler.callbacks
        if type(c).__name__ in counts
    } == counts
