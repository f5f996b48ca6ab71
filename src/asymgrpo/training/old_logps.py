"""Log-probs of the policy that sampled, from the very computation that the update uses.

In half precision the same weights give other log-probs when a batch is cut or packed otherwise, or
without gradient, and some tokens would count as clipped before anything was learnt. So a
micro-batch's old log-probs come from scoring this very micro-batch as the update does:

- Until the weights change, they are the current ones: the first update of a rollout batch needs no
  second pass.
- Just before the weights first change, the micro-batches that were not used yet are scored, with
  the gradient's graph and without a backward pass.

So the ratio of an unchanged policy is exactly 1, however a rollout batch is split.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from asymgrpo.objective.correction import log_weights
from asymgrpo.objective.ratio import CLIPS, clamp_by_sign

OLD = "old_per_token_logps"
SAMPLED = "sampling_per_token_logps"

JUMP = 5.0
"""How many times the usual difference to the sampler is a jump."""
ROUNDING = 0.02
"""Nats a token: smaller differences are half precision's rounding, whatever they were before."""
BROKEN = 0.5
"""Nats a token: no rounding explains this, not even in a first batch."""
MEMORY = 20
"""Batches that the usual difference is taken over."""


class OldLogps(TrainerCallback):
    """Fills in old log-probs before an optimiser step, and compares them with the sampler's."""

    between_steps = ("usual",)

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.usual: list[float] = []
        """The mean differences of the last batches."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        slices = trainer._buffered_inputs or []
        for inputs in slices:
            if OLD not in inputs:
                inputs[OLD] = self._scored(inputs)
        if slices and SAMPLED in slices[0] and trainer._compared_batch != trainer._rollout_batches:
            trainer._compared_batch = trainer._rollout_batches  # kept in checkpoints
            self._compare(slices)

    def _scored(self, inputs: dict[str, Any]) -> Tensor:
        """As the update scores it, so with a graph, which dies here, before the next one's."""
        with torch.enable_grad():
            logps: Tensor = self.trainer._score(self.trainer.model, inputs)[0]
        return logps.detach()

    def _compare(self, slices: list[dict[str, Any]]) -> None:
        """Log how far the sampler's log-probs are from these, and warn when that jumps."""
        trainer, ratio = self.trainer, self.trainer.objective.config.ratio
        parts = [difference_sums(inputs, CLIPS[ratio.clip].bounds(ratio)) for inputs in slices]
        sums = trainer.accelerator.reduce(torch.stack([p[0] for p in parts]).sum(0), "sum")
        largest = trainer.accelerator.gather(torch.stack([p[1] for p in parts]).max()).max()
        tokens, difference, kl, beyond, weights = sums.tolist()
        if not tokens:
            return
        mean = difference / tokens
        trainer._record(
            **{
                "sampling/logp_difference/mean": mean,
                "sampling/logp_difference/max": largest.item(),
                "sampling/kl": kl / tokens,
                "sampling/beyond_clip": beyond / tokens,
                "sampling/weight/mean": weights / tokens,
            }
        )
        if not trainer.filters_tokens:
            self._warn_of_a_jump(mean)

    def _warn_of_a_jump(self, mean: float) -> None:
        usual = statistics.median(self.usual) if self.usual else None
        self.usual = [*self.usual, mean][-MEMORY:]
        jumped = usual is not None and mean > max(JUMP * usual, ROUNDING)
        if mean > BROKEN or jumped:
            before = "" if usual is None else f", {usual:.3g} in the batches before"
            warnings.warn(
                f"the sampler's log-probs differ from the trainer's by {mean:.3g} a token{before}; "
                "one of the two may compute wrongly on this machine: compare with "
                "engine=transformers and with scorer=padded",
                stacklevel=2,
            )


def difference_sums(inputs: dict[str, Any], bounds: Any) -> tuple[Tensor, Tensor]:
    """Sums over a slice's tokens, and the largest absolute difference.

    The sums are of 1, of the absolute difference `|log pi_old - log q|`, of the estimate
    `w - 1 - log w` of KL(q || pi_old), of the tokens whose weight `w = pi_old / q` lies outside of
    the clip's interval, and of `w`.
    """
    mask = inputs["completion_mask"].bool()
    if "tool_mask" in inputs:
        mask = mask & inputs["tool_mask"].bool()
    mask = mask & ~inputs[SAMPLED].isnan()
    logs = log_weights(inputs[OLD], inputs[SAMPLED], mask).double()
    weights = logs.clamp(-30, 30).exp()
    advantages = inputs["advantages"].unsqueeze(1).to(weights.dtype)
    beyond = clamp_by_sign(weights, advantages, bounds) != weights
    columns = (torch.ones_like(logs), logs.abs(), weights - 1 - logs, beyond, weights)
    sums = torch.stack([torch.where(mask, column, 0.0).sum() for column in columns])
    return sums, logs.abs().max() if logs.numel() else logs.new_zeros(())
