"""Which gradients are taken away before the optimiser sees them."""

from __future__ import annotations

import pytest
import torch

from asymgrpo.training.guard import gradients_are_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_among_all_gradients_is_seen(bad):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16())
    assert gradients_are_finite(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1e4)
    assert gradients_are_finite(model)
    model[1].weight.grad[1, 0] = bad
    assert not gradients_are_finite(model)
