"""A model's weights in another dtype, for rollouts of a model that trains in a wider one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .records import Engine, Rollout, Sampling


class ComputeCopy:
    """A copy of the model with parameters of `dtype`; parameters of that dtype are shared.

    Casts that a trainer has wrapped around the model's forward are not copied.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> held = ComputeCopy(layer, torch.bfloat16)
    >>> _ = layer.weight.data.fill_(3)
    >>> held.refresh()
    >>> held.model.weight.tolist()
    [[3.0, 3.0]]
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        memo: dict[int, Any] = {}
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        for parameter in model.parameters():
            shared = parameter.dtype == dtype or not parameter.is_floating_point()
            held: Any = parameter
            if not shared:
                held = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                self._targets.append(held)
                self._sources.append(parameter)
            memo[id(parameter)] = held
        self.model = copy.deepcopy(model, memo)
        for name in ("forward", "_original_forward"):  # accelerate's autocast, on the instance
            self.model.__dict__.pop(name, None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the model's current values."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class RefreshedEngine:
    """An engine on a copy of the model, refreshed before every request."""

    def __init__(self, engine: Engine, held: ComputeCopy) -> None:
        self.engine: Any = engine
        self.name: str = engine.name
        self._held = held

    @property
    def most_rows(self) -> int:
        """Rollouts decoded together."""
        return int(self.engine.most_rows)

    @most_rows.setter
    def most_rows(self, rows: int) -> None:
        self.engine.most_rows = rows

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Rollout]:
        """The engine's rollouts, on the current weights."""
        self._held.refresh()
        rollouts: list[Rollout] = self.engine.generate(prompts, sampling, seeds, on_progress)
        return rollouts

    def release(self) -> None:
        """Frees what the engine keeps on a GPU between calls."""
        release = getattr(self.engine, "release", None)
        if release is not None:
            release()
