"""Low-rank adapters with settings that suit reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asymgrpo.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(
    rank: int,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
) -> LoraConfig:
    """LoRA on every linear layer except the head, with `alpha` twice the rank by default.

    Dropout is 0 by default: with dropout, the policy that is trained differs from the policy that
    sampled.

    >>> config = lora_config(8)
    >>> config.r, config.lora_alpha, config.target_modules
    (8, 16, 'all-linear')
    """
    from peft import LoraConfig

    if rank < 1:
        raise UserError(f"the LoRA rank must be at least 1, not {rank}")
    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
