"""Under every option that keeps something between steps, a run cut after every step is exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from option_sets import OPTION_SETS
from runs import small, with_model

from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
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
