"""Steps whose loss or gradient is not finite: skipped, counted, their rollouts saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from asymgrpo.errors import UserError

MOST_IN_A_ROW = 3
SMALLEST_SCALE = 1.0
"""A loss scale that no longer scales up: gradients that overflow below it are the run's own."""


def gradients_are_finite(model: torch.nn.Module) -> bool:
    """Whether the gradient of `model` has a finite norm, so that it can be clipped and applied.

    >>> layer = torch.nn.Linear(1, 1)
    >>> layer(torch.ones(1, 1)).backward()
    >>> gradients_are_finite(layer)
    True
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # One pass over all tensors at once: an adapter has hundreds of small ones.
    return bool(torch.nn.utils.get_total_norm(gradients).isfinite())


class FiniteGuard(TrainerCallback):
    """Takes the gradients of a bad step away before the optimiser sees them."""

    between_steps = ("bad_steps",)

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.bad_steps: list[int] = []
        """The run of bad steps that ends now."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if gradients_are_finite(model):
            self.bad_steps = []
            return
        if self._scaler_will_skip():
            self.trainer._record(**{"gradient/skipped": 1.0})
            return
        for parameter in model.parameters():
            parameter.grad = None  # the optimiser passes over what has none
        step = state.global_step + 1
        self.bad_steps.append(step)
        path = Path(args.output_dir) / "nonfinite" / f"step-{step:06d}.json"
        if state.is_world_process_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._rollouts()), encoding="utf-8")
        self.trainer._record(**{"gradient/skipped": 1.0})
        self.trainer._say(f"step {step} skipped: its gradient is not finite; rollouts in {path}")
        if len(self.bad_steps) >= MOST_IN_A_ROW:
            steps = ", ".join(map(str, self.bad_steps))
            raise UserError(
                f"the gradient was not finite in steps {steps}; their rollouts are in "
                f"{path.parent}; lower learning_rate, or look at the rewards there"
            )

    def _scaler_will_skip(self) -> bool:
        """Whether float16's loss scaler expects this: it skips the step and halves its scale."""
        scaler = self.trainer.accelerator.scaler
        return scaler is not None and scaler.get_scale() > SMALLEST_SCALE

    def _rollouts(self) -> list[dict[str, Any]]:
        """The rollouts of the last slice that was used."""
        trainer = self.trainer
        slices = trainer._buffered_inputs or []
        if not slices:
            return []
        # The trainer has counted this slice already.
        inputs = slices[(trainer._step - 1) % len(slices)]
        texts = trainer._tokenizer.batch_decode(inputs["completion_ids"])
        prompts = trainer._tokenizer.batch_decode(inputs["prompt_ids"])
        advantages = inputs["advantages"].tolist()
        return [
            {"prompt": prompt, "completion": text, "advantage": advantage}
            for prompt, text, advantage in zip(prompts, texts, advantages, strict=True)
        ]
