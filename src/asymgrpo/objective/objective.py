"""The pieces composed: an `Objective` is a config that can be called on a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from asymgrpo.objective.aggregate import aggregate
from asymgrpo.objective.batch import TokenBatch
from asymgrpo.objective.config import ObjectiveConfig
from asymgrpo.objective.correction import sampling_correction
from asymgrpo.objective.entropy import top_entropy_threshold
from asymgrpo.objective.horizon import discount, is_discounted
from asymgrpo.objective.kl import kl_divergence
from asymgrpo.objective.masked import masked_mean
from asymgrpo.objective.ratio import CLIPS, clamp_by_sign, importance_ratio, quadrants
from asymgrpo.objective.trace import Measured, MetricSums, TokenTrace, sum_metrics


@dataclass(frozen=True)
class LossOutput:
    """A loss, and on demand what it was made of."""

    loss: Tensor
    """Scalar, with gradient."""
    _measure: Callable[[], MetricSums]
    _trace: Callable[[], TokenTrace]

    @cached_property
    def sums(self) -> MetricSums:
        """The metrics before their division, for adding up over processes."""
        return self._measure()

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Floats by name, as the documentation's table defines them."""
        return self.sums.means()

    @cached_property
    def tokens(self) -> TokenTrace:
        """Token by token: weight, discount, ratio, surrogate, quadrant, clipped."""
        return self._trace()


class _Terms(NamedTuple):
    ratio: Tensor  # [B, T or 1]
    undiscounted: Tensor  # [B, T], all weights but the horizon's applied
    surrogate: Tensor  # [B, T], the horizon's as well


class Objective:
    """A loss over a batch of rollouts.

    >>> objective = Objective(ObjectiveConfig())
    >>> logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> out = objective(TokenBatch(logps, None, torch.ones(1, 2), torch.tensor([1.0])))
    >>> out.loss.item(), out.metrics["ratio/mean"]
    (-1.0, 1.0)
    """

    def __init__(self, config: ObjectiveConfig):
        self.config = config

    def __call__(self, batch: TokenBatch) -> LossOutput:
        self._require(batch)
        batch = batch.cleaned()
        weights = self._weights(batch)
        selected = self.selected_tokens(batch)
        terms = self._terms(batch, weights, selected)
        kl = self._kl(batch, terms.ratio)
        losses = -terms.surrogate if kl is None else self.config.kl.beta * kl - terms.surrogate
        loss = aggregate(
            losses,
            batch.mask,
            self.config.aggregate,
            token_count=batch.token_count,
            rollout_count=batch.rollout_count,
            max_length=batch.max_length,
        )
        if self.config.entropy_bonus and batch.entropies is not None:
            within = batch.mask if selected is None else selected
            bonus = masked_mean(batch.entropies, within, dim=None)
            loss = loss - self.config.entropy_bonus * bonus
        detached = batch.detached()

        def trace() -> TokenTrace:
            return self._trace(detached, weights, selected)

        def measure() -> MetricSums:
            return self._measure(detached, weights, terms, kl)

        return LossOutput(loss, measure, trace)

    def _require(self, batch: TokenBatch) -> None:
        config = self.config
        if batch.entropies is None:
            for name, needed in {
                "the horizon": config.horizon.active,
                "entropy_bonus": config.entropy_bonus != 0,
                "top_entropy": config.top_entropy < 1,
            }.items():
                if needed:
                    raise ValueError(f"entropies are needed by {name}")
        if config.kl.beta > 0 and batch.ref_logps is None:
            raise ValueError(f"ref_logps are needed by beta = {config.kl.beta}")
        if config.sampling.correction != "none" and batch.sampling_logps is None:
            raise ValueError(f"sampling_logps are needed by {config.sampling.correction}")

    def _weights(self, batch: TokenBatch) -> Tensor | None:
        """The horizon's weight [B, T], exactly 1 where it does not apply; None if nowhere."""
        horizon = self.config.horizon
        if not horizon.active or batch.entropies is None:
            return None
        weights = discount(
            batch.entropies,
            batch.mask,
            horizon.alpha,
            batch.vocab_size,
            horizon.normalize,
            horizon.inclusive,
        )
        applies = is_discounted(batch.advantages, horizon.applies_to).unsqueeze(1)
        return weights.masked_fill_(~applies, 1.0)

    def selected_tokens(self, batch: TokenBatch) -> Tensor | None:
        """Tokens [B, T] of a cleaned batch that `top_entropy` keeps; None if it keeps all."""
        if self.config.top_entropy == 1 or batch.entropies is None:
            return None
        entropies, threshold = batch.entropies.detach(), batch.entropy_threshold
        if threshold is None:
            threshold = top_entropy_threshold(entropies[batch.mask], self.config.top_entropy)
        return (entropies >= threshold) & batch.mask

    def _terms(self, batch: TokenBatch, weights: Tensor | None, selected: Tensor | None) -> _Terms:
        old_logps = batch.logps.detach() if batch.old_logps is None else batch.old_logps
        ratio = importance_ratio(batch.logps, old_logps, batch.mask, self.config.ratio.level)
        surrogate = CLIPS[self.config.ratio.clip].surrogate(
            ratio, batch.advantages.unsqueeze(1), batch.logps, self.config.ratio
        )
        for factor in (batch.sampling_weights, self._correction(batch, old_logps), selected):
            if factor is not None:
                surrogate = surrogate * factor
        undiscounted = surrogate.expand_as(batch.logps)
        return _Terms(ratio, undiscounted, undiscounted if weights is None else surrogate * weights)

    def _correction(self, batch: TokenBatch, old_logps: Tensor) -> Tensor | None:
        """Weights [B, T] or [B, 1] for what the sampler's log-probs differ by; None for none."""
        how, logps = self.config.sampling, batch.sampling_logps
        if logps is None:
            return None
        bounds = {"low": how.correction_min, "high": how.correction_max}
        return sampling_correction(old_logps, logps, batch.mask, how.correction, **bounds)

    def _kl(self, batch: TokenBatch, ratio: Tensor) -> Tensor | None:
        if self.config.kl.beta == 0 or batch.ref_logps is None:
            return None
        kl = kl_divergence(batch.logps, batch.ref_logps, self.config.kl.estimator)
        return kl * ratio if self.config.kl.bias_correction else kl

    def _trace(
        self, batch: TokenBatch, weights: Tensor | None, selected: Tensor | None
    ) -> TokenTrace:
        with torch.enable_grad():
            probe = batch.with_logps(batch.logps.clone().requires_grad_())
            terms = self._terms(probe, weights, selected)
            total = torch.where(batch.mask, terms.surrogate, 0.0).sum()
            (weight,) = torch.autograd.grad(total, probe.logps)
        ratio, advantages = terms.ratio.detach(), batch.advantages.unsqueeze(1)
        bounds = CLIPS[self.config.ratio.clip].bounds(self.config.ratio)
        values = {
            "weight": weight,
            "discount": torch.ones_like(batch.logps) if weights is None else weights,
            "ratio": ratio,
            "surrogate": terms.surrogate.detach(),
            "quadrant": quadrants(ratio, advantages, self.config.ratio),
            "clipped": clamp_by_sign(ratio, advantages, bounds) != ratio,
        }
        empty = ~batch.mask
        return TokenTrace(
            **{
                name: value.expand_as(batch.logps).masked_fill(empty, 0)
                for name, value in values.items()
            }
        )

    def _measure(
        self, batch: TokenBatch, weights: Tensor | None, terms: _Terms, kl: Tensor | None
    ) -> MetricSums:
        applies = "none" if weights is None else self.config.horizon.applies_to
        measured = Measured(
            mask=batch.mask,
            advantages=batch.advantages,
            discounted=is_discounted(batch.advantages, applies),
            weights=weights,
            ratio=terms.ratio.detach(),
            undiscounted=terms.undiscounted.detach(),
            surrogate=terms.surrogate.detach(),
            entropies=batch.entropies,
            kl=None if kl is None else kl.detach(),
        )
        return sum_metrics(measured, self.config.ratio)
