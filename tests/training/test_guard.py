"""Which gradients are taken away before the optimiser sees them, and which end a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asymgrpo.errors import UserError
from asymgrpo.training.guard import FiniteGuard, gradients_are_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_among_all_gradients_is_seen(bad):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16())
    assert gradients_are_finite(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1e4)
    assert gradients_are_finite(model)
    model[1].weight.grad[1, 0] = bad
    assert not gradients_are_finite(model)


class Scaled:
    """A float16 training loop with torch's own loss scaler, under the guard."""

    def __init__(self, folder: Path):
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16))
        self.recorded: list[dict[str, float]] = []
        self._buffered_inputs: list[Any] = []
        self.guard = FiniteGuard(self)
        self.args = SimpleNamespace(output_dir=str(folder))
        self.step_number = 0

    def _record(self, **values: float) -> None:
        self.recorded.append(values)

    def _say(self, line: str) -> None:
        pass

    def step(self, factor: float) -> None:
        """As transformers' loop: backward, unscale, the guard, the optimiser, the scaler."""
        scaler = self.accelerator.scaler
        with torch.autocast("cpu", torch.float16):
            output = self.model(torch.ones(2, 4))
        scaler.scale(output.float().sum() * factor).backward()
        scaler.unscale_(self.optimizer)
        state = SimpleNamespace(global_step=self.step_number, is_world_process_zero=True)
        self.guard.on_pre_optimizer_step(self.args, state, None, model=self.model)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        self.step_number += 1


def test_overflow_that_the_loss_scaler_expects_ends_no_run(tmp_path: Path) -> None:
    """The scale begins at 65,536 and is halved until float16 holds the gradient."""
    run = Scaled(tmp_path)
    before = run.model.weight.detach().clone()
    for _ in range(12):
        run.step(factor=30.0)
    skipped = len(run.recorded)
    assert 3 <= skipped < 12  # more in a row than would end a run
    assert run.guard.bad_steps == []
    assert run.accelerator.scaler.get_scale() == 2.0 ** (16 - skipped)
    assert not (tmp_path / "nonfinite").exists()
    assert (run.model.weight != before).all()


def test_what_no_scale_explains_ends_the_run(tmp_path: Path) -> None:
    """Not a number at every scale: once the scaler has nothing left to halve, three are enough."""
    run = Scaled(tmp_path)
    for _ in range(18):
        run.step(factor=float("nan"))
    with pytest.raises(UserError, match="the gradient was not finite in steps 17, 18, 19"):
        run.step(factor=float("nan"))
    assert run.accelerator.scaler.get_scale() <= 1.0
