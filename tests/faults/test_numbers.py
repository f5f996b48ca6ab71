"""Losses and gradients that are no numbers, and memory that runs out."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.errors import UserError
from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.rollout.native import NativeEngine
from asymgrpo.training.scorer import PackedScorer
from outcome import outcome


def spoil(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the loss of these steps."""
    original = run_module.AsymGRPOTrainer._compute_loss

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * factors.get(self.state.global_step + 1, 1.0)

    monkeypatch.setattr(run_module.AsymGRPOTrainer, "_compute_loss", spoilt)


def test_steps_that_are_not_finite_are_skipped_counted_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, {2: math.nan, 3: math.inf})
    train_run(small(), tmp_path / "run")
    rows = {row["step"]: row for row in RunStore(tmp_path / "run").metrics()}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    assert {step for step, row in rows.items() if "gradient/skipped" in row} == {2, 3}
    weights = outcome(tmp_path / "run")["weights"].values()
    assert all(torch.tensor(value).isfinite().all() for value in weights)
    for step in (2, 3):
        saved = json.loads((tmp_path / f"run/nonfinite/step-{step:06d}.json").read_text())
        assert len(saved) == 8
        assert set(saved[0]) == {"prompt", "completion", "advantage"}
    assert "step 2 skipped: its gradient is not finite" in capsys.readouterr().out


def test_three_in_a_row_end_the_run_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {2: math.nan, 3: math.nan, 4: math.nan})
    with pytest.raises(UserError, match="not finite in steps 2, 3, 4; their rollouts are in"):
        train_run(small(), tmp_path / "run")
    assert RunStore(tmp_path / "run").run()["status"] == "failed"
    assert len(list((tmp_path / "run/nonfinite").iterdir())) == 3


def test_out_of_memory_goes_on_with_less_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small(steps=2)
    train_run(settings, tmp_path / "roomy")
    score, decode = PackedScorer._pass, NativeEngine._decode
    monkeypatch.setattr(PackedScorer, "_pass", lambda self, causal, groups, device: (
        _no_memory() if len(groups) > 1 else score(self, causal, groups, device)))  # fmt: skip
    monkeypatch.setattr(NativeEngine, "_decode", lambda self, wave, *rest: (
        _no_memory() if sum(len(g.rows) for g in wave) > 3 else decode(self, wave, *rest)
    ))  # fmt: skip
    capsys.readouterr()
    train_run(settings, tmp_path / "tight")
    said = capsys.readouterr().out
    assert "out of memory in the rollout; going on with 2 rollouts at a time" in said
    assert "out of memory in the update; going on with" in said
    roomy, tight = RunStore(tmp_path / "roomy"), RunStore(tmp_path / "tight")
    tokens = [[row["token_ids"] for row in store.rollouts(2)] for store in (roomy, tight)]
    assert tokens[0] == tokens[1]
    losses = [[row["grad_norm"] for row in store.metrics()] for store in (roomy, tight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def _no_memory() -> Any:
    raise torch.OutOfMemoryError("simulated")
