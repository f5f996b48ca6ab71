"""Which tokens count by their entropy (2506.01939: the forking tokens carry the learning)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_entropy_threshold(entropies: Tensor, fraction: float) -> Tensor:
    """The entropy that the top `fraction` of the values [N] reach: their (1 - fraction) quantile.

    Linear between neighbours, as `torch.quantile`, but without its limit on N. Of no values it
    is infinite, so that nothing is selected.

    >>> top_entropy_threshold(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 0.25)
    tensor(3.)
    """
    if entropies.dim() != 1:
        raise ValueError(f"entropies must be flat [N], got {tuple(entropies.shape)}")
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction must be in (0, 1], got {fraction}")
    if entropies.numel() == 0:
        return entropies.new_tensor(math.inf)
    ordered = entropies.sort().values
    position = (1 - fraction) * (ordered.numel() - 1)
    below = math.floor(position)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
