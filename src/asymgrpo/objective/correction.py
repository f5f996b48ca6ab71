"""Weights for tokens that another computation sampled than the one that scores them.

An engine's log-probs differ from the trainer's by rounding, and by far more where tokens are
filtered (top-p, top-k, min-p, repetition penalty). With `w = pi_old / q`, `q` the distribution that
the token was drawn from:

- truncate (TIS): `min(max(w, min), max)`, of the token or, as the product over its tokens, of the
  rollout.
- mask (token: IcePop; sequence: MIS): `w` inside `[min, max]`, 0 outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asymgrpo.objective.ratio import LOG_RATIO_LIMIT

Bound = Callable[[Tensor, float, float], Tensor]


def truncate(weights: Tensor, low: float, high: float) -> Tensor:
    """The nearest weight in `[low, high]`."""
    return weights.clamp(low, high)


def mask_outside(weights: Tensor, low: float, high: float) -> Tensor:
    """The weight itself in `[low, high]`, 0 outside."""
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


CORRECTIONS: dict[str, tuple[str, Bound] | None] = {
    "none": None,
    "token-truncate": ("token", truncate),
    "token-mask": ("token", mask_outside),
    "sequence-truncate": ("sequence", truncate),
    "sequence-mask": ("sequence", mask_outside),
}
"""Name to the level of the weight and what bounds it."""


def log_weights(old_logps: Tensor, sampling_logps: Tensor, mask: Tensor) -> Tensor:
    """`log pi_old - log q` [B, T]; 0 outside `mask` and where the engine knew no log-prob (NaN)."""
    for name, value in (("sampling_logps", sampling_logps), ("mask", mask)):
        if value.shape != old_logps.shape:
            raise ValueError(
                f"{name} must have the shape of old_logps, {list(old_logps.shape)}, got "
                f"{list(value.shape)}"
            )
    wide = torch.promote_types(old_logps.dtype, torch.float32)
    difference = old_logps.to(wide) - sampling_logps.to(wide)
    return torch.where(mask.bool() & ~difference.isnan(), difference, 0.0)


def sampling_correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    mask: Tensor,
    mode: str,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor | None:
    """Weights [B, T] (token) or [B, 1] (sequence) from three [B, T] tensors; None for mode none.

    >>> import math
    >>> old, q = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0 - math.log(4)]])
    >>> sampling_correction(old, q, torch.ones(1, 2), "token-truncate")
    tensor([[1., 2.]])
    >>> sampling_correction(old, q, torch.ones(1, 2), "sequence-mask")
    tensor([[0.]])
    """
    if mode not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTIONS)}, got {mode!r}")
    chosen = CORRECTIONS[mode]
    if chosen is None:
        return None
    level, bound = chosen
    logs = log_weights(old_logps, sampling_logps, mask)
    if level == "sequence":
        logs = logs.sum(1, keepdim=True)
    return bound(logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), low, high)
