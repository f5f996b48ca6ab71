"""Entropies to the discount, and which rollouts it applies to.

AH-GRPO and SA-AH-GRPO (2606.05434): D_t = exp(-alpha * sum_{k<=t} H_k / log V) over a rollout's
completion tokens. Two choices are ours where the paper is silent: the entropy is divided by
log V (`normalize="vocab"`), and the sum includes the current token (`inclusive=True`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

APPLIES_TO: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda advantages: torch.zeros_like(advantages, dtype=torch.bool),
    "all": lambda advantages: torch.ones_like(advantages, dtype=torch.bool),
    "negative": lambda advantages: advantages < 0,
}
"""Advantages [B] to which rollouts [B] the discount applies to."""

NORMALIZATIONS = ("vocab", "none")


@torch.no_grad()
def discount(
    entropies: Tensor,
    mask: Tensor,
    alpha: float,
    vocab_size: int | None = None,
    normalize: str = "vocab",
    inclusive: bool = True,
) -> Tensor:
    """`entropies` [B, T] in nats and a boolean `mask` [B, T] to the discount [B, T].

    A constant of the update: no gradient flows through it. 0 outside the mask.

    >>> entropies, mask = torch.full((1, 3), math.log(10)), torch.ones(1, 3, dtype=torch.bool)
    >>> discount(entropies, mask, alpha=math.log(2), vocab_size=10)
    tensor([[0.5000, 0.2500, 0.1250]])
    """
    if entropies.dim() != 2 or mask.shape != entropies.shape:
        raise ValueError(
            f"entropies and mask must both be [B, T], got {tuple(entropies.shape)} and "
            f"{tuple(mask.shape)}"
        )
    if not alpha >= 0:  # also refuses NaN
        raise ValueError(f"alpha must be at least 0, got {alpha}")
    rate = alpha
    if normalize == "vocab":
        if vocab_size is None or vocab_size < 2:
            raise ValueError('vocab_size (at least 2) is needed by normalize="vocab"')
        rate = alpha / math.log(vocab_size)
    elif normalize != "none":
        raise ValueError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    spent = torch.where(mask, entropies, 0.0)
    horizon = spent.cumsum(1)
    if not inclusive:
        horizon = horizon - spent
    return horizon.mul_(-rate).exp_().masked_fill_(~mask, 0.0)


def is_discounted(advantages: Tensor, applies_to: str) -> Tensor:
    """Which rollouts [B] the discount applies to, from `advantages` [B].

    >>> is_discounted(torch.tensor([-1.0, 0.0, 1.0]), "negative")
    tensor([ True, False, False])
    """
    if applies_to not in APPLIES_TO:
        raise ValueError(f"applies_to must be one of {', '.join(APPLIES_TO)}, got {applies_to!r}")
    return APPLIES_TO[applies_to](advantages)
