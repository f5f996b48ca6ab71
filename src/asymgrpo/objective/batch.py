"""What goes into an objective: a frozen record that checks its shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """B rollouts of at most T tokens. Where `mask` is 0 the other tensors may hold anything.

    >>> batch = TokenBatch(torch.zeros(2, 3), None, torch.ones(2, 3), torch.ones(2))
    >>> TokenBatch(torch.zeros(2, 3), None, torch.ones(2, 3), torch.ones(3))
    Traceback (most recent call last):
    ...
    ValueError: advantages must have shape [B] = [2], got [3]
    """

    logps: Tensor
    """[B, T] log-probabilities under the current policy, with gradient."""
    old_logps: Tensor | None
    """[B, T] under the policy that sampled; None says that it is the current one."""
    mask: Tensor
    """[B, T] 1 on completion tokens."""
    advantages: Tensor
    """[B]"""
    entropies: Tensor | None = None
    """[B, T] nats; needed by the horizon, the entropy bonus and top-entropy."""
    ref_logps: Tensor | None = None
    """[B, T] under the reference; needed when beta > 0."""
    sampling_weights: Tensor | None = None
    """[B, T] or [B, 1]: correction for an engine whose log-probabilities differ."""
    sampling_logps: Tensor | None = None
    """[B, T] under the distribution that each token was drawn from, NaN where unknown; `correction`
    makes further sampling weights of them."""
    vocab_size: int | None = None
    """Needed by entropy normalisation."""
    token_count: Tensor | float | None = None
    """What token-mean divides by, where this batch is a slice of a larger one."""
    rollout_count: Tensor | float | None = None
    """What sequence-mean and fixed-length divide by; else the rollouts that have tokens."""
    max_length: int | None = None
    """The constant of fixed-length; else T."""
    entropy_threshold: Tensor | None = None
    """Scalar, for top-entropy over more than this batch; else this batch's quantile."""

    def __post_init__(self) -> None:
        if self.logps.dim() != 2:
            raise ValueError(f"logps must have shape [B, T], got {list(self.logps.shape)}")
        rows, columns = self.logps.shape
        for name in ("old_logps", "mask", "entropies", "ref_logps", "sampling_logps"):
            self._check(name, "[B, T]", [rows, columns])
        self._check("advantages", "[B]", [rows])
        if self.sampling_weights is not None and self.sampling_weights.shape != (rows, 1):
            self._check("sampling_weights", "[B, T] or [B, 1]", [rows, columns])

    def _check(self, name: str, letters: str, expected: list[int]) -> None:
        value = getattr(self, name)
        if value is not None and list(value.shape) != expected:
            raise ValueError(
                f"{name} must have shape {letters} = {expected}, got {list(value.shape)}"
            )

    def cleaned(self) -> TokenBatch:
        """The same batch with a boolean mask and at least float32 numbers.

        What is multiplied is 0 outside the mask, so that NaN reaches no gradient; entropies are
        only ever selected or summed under the mask, and stay as they are.
        """
        mask = self.mask.bool()
        present = mask.sum(1, keepdim=True) > 0

        def clean(values: Any) -> Any:
            if values is None:
                return None
            values = _at_least_float32(values)
            # A [B, 1] weight belongs to its rollout, not to a position; one without tokens is free
            # to hold anything.
            keep = mask if values.shape == mask.shape else present
            return torch.where(keep, values, 0.0)

        columns = ("logps", "old_logps", "ref_logps", "sampling_weights")
        return replace(
            self,
            mask=mask,
            advantages=torch.where(present.squeeze(1), _at_least_float32(self.advantages), 0.0),
            entropies=None if self.entropies is None else _at_least_float32(self.entropies),
            **{name: clean(getattr(self, name)) for name in columns},
        )

    def detached(self) -> TokenBatch:
        """The same batch outside of the autograd graph."""
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        tensors = {name: v.detach() for name, v in values.items() if isinstance(v, Tensor)}
        return TokenBatch(**values | tensors)

    def with_logps(self, logps: Tensor) -> TokenBatch:
        """The same batch; on-policy rollouts keep the old log-probabilities of this one."""
        old_logps = self.logps if self.old_logps is None else self.old_logps
        return replace(self, logps=logps, old_logps=old_logps)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
