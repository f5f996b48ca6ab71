"""The entropy bonus under TRL's control: a fixed coefficient, or one steered towards a target.

Mixed into the TRL trainer, which keeps the controller's state in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asymgrpo.objective.batch import TokenBatch
from asymgrpo.objective.objective import Objective


class EntropyControl:
    """Which coefficient acts on a step, and how it moves."""

    objective: Objective
    accelerator: Any
    args: Any
    model: Any
    entropy_coef: float
    use_adaptive_entropy: bool
    _entropy_bonus_enabled: bool
    _entropy_window_stats: Tensor | None
    _last_world_entropy: float
    _record: Callable[..., None]

    def _entropy_coefficient(self) -> float:
        """An adaptive bonus acts only while the last window's entropy is at most its target."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return float(self.entropy_coef)

    def _record_entropy_control(self, batch: TokenBatch, loss: Tensor, coefficient: float) -> None:
        if not self._entropy_bonus_enabled or batch.entropies is None:
            return
        within = self.objective.selected_tokens(batch.cleaned())
        within = batch.mask.bool() if within is None else within
        total, count = batch.entropies.detach()[within].sum(), within.sum()
        policy_loss = loss + coefficient * total / count.clamp(min=1)
        self._record(policy_loss=self.accelerator.gather(policy_loss).nanmean().item())
        if not self.model.training:
            return
        if self.use_adaptive_entropy:
            self._steer_entropy(torch.stack([total, count.to(total.dtype)]))
        if self.accelerator.sync_gradients:
            self._record(entropy_coef=float(self.entropy_coef))

    def _steer_entropy(self, window: Tensor) -> None:
        """Move the coefficient by a notch once an optimiser step, on that step's mean entropy."""
        seen = self._entropy_window_stats
        self._entropy_window_stats = window if seen is None else seen + window
        if not self.accelerator.sync_gradients:
            return
        total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
        entropy = total / max(count, 1.0)
        args = self.args
        notch = args.entropy_coef_delta * (1 if entropy <= args.entropy_target else -1)
        moved = self.entropy_coef + notch
        self.entropy_coef = min(max(moved, args.entropy_coef_min), args.entropy_coef_max)
        self._last_world_entropy, self._entropy_window_stats = entropy, None
