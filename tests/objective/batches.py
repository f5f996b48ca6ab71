"""Random ragged batches, as the package takes them and as the reference does."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace

import torch
from torch import Tensor

from asymgrpo import Objective, ObjectiveConfig, TokenBatch
from reference import Result, Rollout, Settings, evaluate

VOCAB = 50
SEEDS = range(50)
FEW_SEEDS = range(12)
GARBAGE = (math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0)


def random_batch(seed: int, dtype: torch.dtype = torch.float64, spread: float = 0.4) -> TokenBatch:
    """Up to 8 rollouts of 0 to 12 tokens, holes in their masks, garbage outside them.

    `spread` is the deviation of the log-ratios. Some advantages are 0.
    """
    random = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    rows, columns = integer(1, 8), integer(1, 12)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=random, dtype=torch.float64)

    lengths = torch.randint(0, columns + 1, (rows, 1), generator=random)
    mask = (torch.arange(columns) < lengths) & (normal() > -1)
    garbage = torch.tensor(GARBAGE, dtype=dtype)

    def soiled(values: Tensor) -> Tensor:
        picks = torch.randint(0, len(GARBAGE), values.shape, generator=random)
        return torch.where(mask, values.to(dtype), garbage[picks])

    logps = -2 * normal().abs()
    advantages = normal()[:, 0].to(dtype)
    return TokenBatch(
        logps=soiled(logps).requires_grad_(),
        old_logps=soiled(logps + spread * normal()),
        mask=mask.to(torch.int64),
        advantages=torch.where(advantages.abs() < 0.2, 0.0, advantages),
        entropies=soiled(normal().abs()).requires_grad_(),
        ref_logps=soiled(logps + spread * normal()),
        sampling_weights=soiled(torch.exp(0.3 * normal())),
        vocab_size=VOCAB,
    )


def rollouts_of(batch: TokenBatch) -> list[Rollout]:
    """The batch without its padding."""
    result = []
    for row in range(len(batch.mask)):
        kept = batch.mask[row].bool()

        def tokens(values: Tensor | None, row: int = row, kept: Tensor = kept):
            if values is None:
                return None
            values = values.detach().expand(batch.mask.shape)
            return values[row][kept].double().tolist()

        result.append(
            Rollout(
                advantage=batch.advantages[row].item(),
                logps=tokens(batch.logps),
                old_logps=tokens(batch.logps if batch.old_logps is None else batch.old_logps),
                entropies=tokens(batch.entropies),
                ref_logps=tokens(batch.ref_logps),
                sampling_weights=tokens(batch.sampling_weights),
                sampling_logps=tokens(batch.sampling_logps),
            )
        )
    return result


def settings_of(config: ObjectiveConfig) -> Settings:
    """The leaves of a configuration by name, whatever group they live in."""
    leaves: dict[str, object] = {}
    for name, value in asdict(config).items():
        leaves |= value if isinstance(value, dict) else {name: value}
    return Settings(**{entry.name: leaves[entry.name] for entry in fields(Settings)})


def expected(config: ObjectiveConfig, batch: TokenBatch) -> Result:
    return evaluate(
        rollouts_of(batch),
        settings_of(config),
        vocab_size=VOCAB,
        max_length=batch.max_length or batch.mask.shape[1],
    )


def padded(rows: list[list[float]], mask: Tensor) -> Tensor:
    """Ragged lists back to the places of their tokens; 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    for row, values in enumerate(rows):
        result[row, mask[row].bool()] = torch.tensor(values, dtype=torch.float64)
    return result


def gradients(config: ObjectiveConfig, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """The loss, detached, and its gradient by logps."""
    loss = Objective(config)(batch).loss
    (gradient,) = torch.autograd.grad(loss, batch.logps)
    return loss.detach(), gradient


def rows_of(batch: TokenBatch, rows: Tensor | slice | list[int]) -> TokenBatch:
    """Some of the rollouts, as a batch of their own."""
    picked = {
        entry.name: value[rows].detach().requires_grad_(value.requires_grad)
        for entry in fields(batch)
        if isinstance(value := getattr(batch, entry.name), Tensor) and value.dim() > 0
    }
    return replace(batch, **picked)
