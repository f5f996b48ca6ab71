"""Float32 masters of weights that a model holds in a narrower type.

The model samples and scores in bfloat16, which keeps 8 bits of a number: an update a thousandth of
its weight is lost. The optimiser therefore works on float32 masters, gradients add up in float32,
and after each step the working weights are the masters, rounded. Works through the hooks that any
torch optimiser has, so the optimiser's kernels, schedule and state stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asymgrpo.errors import UserError

STATE_KEY = "master_weights"


class MasterWeights:
    """Puts masters in the place of an optimiser's narrow parameters.

    `wide_gradients` lets gradients add up in float32; without it they are of the working type.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = torch.optim.SGD([weight], lr=1e-3)
    >>> masters = MasterWeights(optimizer)
    >>> for _ in range(10):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> weight.item(), round(masters.of(weight).item(), 4)
    (0.98828125, 0.99)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, wide_gradients: bool = True) -> None:
        if optimizer.state:
            raise UserError("float32 masters need an optimizer that has not taken a step yet")
        self._masters: dict[nn.Parameter, Tensor] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._adopt(p, wide_gradients) for p in group["params"]]
        optimizer.register_step_pre_hook(self._take_gradients)
        optimizer.register_step_post_hook(self._round_to_working)
        optimizer.register_state_dict_post_hook(self._into_state)
        optimizer.register_load_state_dict_pre_hook(self._from_state)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The master of a parameter, or the parameter itself where it needs none."""
        return self._masters.get(parameter, parameter)

    def _adopt(self, parameter: nn.Parameter, wide_gradients: bool) -> Tensor:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        if wide_gradients:
            parameter.grad_dtype = torch.float32
        self._masters[parameter] = parameter.detach().float().requires_grad_()
        return self._masters[parameter]

    def _take_gradients(self, *_: Any) -> None:
        for parameter, master in self._masters.items():
            gradient = parameter.grad
            master.grad = None if gradient is None else gradient.float()

    @torch.no_grad()
    def _round_to_working(self, *_: Any) -> None:
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))
        for master in self._masters.values():
            master.grad = None

    def _into_state(self, _: Any, state: dict[str, Any]) -> None:
        state[STATE_KEY] = [master.detach() for master in self._masters.values()]

    @torch.no_grad()
    def _from_state(self, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = dict(state)
        saved = state.pop(STATE_KEY, None)
        if saved is None:  # of a run without masters: the weights that were loaded are all there is
            saved = [parameter.detach() for parameter in self._masters]
        if [tensor.shape for tensor in saved] != [p.shape for p in self._masters]:
            raise ValueError("the saved master weights are those of another model")
        for master, value in zip(self._masters.values(), saved, strict=True):
            master.copy_(value)
        self._round_to_working()
        return state
