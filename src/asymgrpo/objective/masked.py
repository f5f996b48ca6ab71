"""Sums and means under a mask. What lies outside the mask may be anything, NaN included."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """Sum of `values` [B, T] where the boolean `mask` [B, T] holds, along `dim` or over all.

    >>> masked_sum(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]), dim=None)
    tensor(1.)
    """
    if mask.dtype != torch.bool or mask.shape != values.shape:
        raise ValueError(
            f"mask must be boolean of shape {tuple(values.shape)}, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    kept = torch.where(mask, values, 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """Mean of `values` [B, T] where `mask` holds; 0 where it holds nowhere.

    >>> values = torch.tensor([[1.0, 3.0, 9.0], [5.0, 5.0, 5.0]])
    >>> masked_mean(values, torch.tensor([[1, 1, 0], [0, 0, 0]]).bool(), dim=1)
    tensor([2., 0.])
    """
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)
