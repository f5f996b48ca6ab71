"""Comparing another way of running a model with the model's own forward.

The native engine, its fused kernels and the packed scorer each replace a part of a model's forward.
Whether that works for a model at hand, on the device at hand, is tried on a few tokens before it is
used. All three use the same tokens, the same reference and the same criterion.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .description import text_config
from .module_state import decoding

PREFIX = 4
"""Tokens that the first two rows of the probe share, as rollouts share a prompt."""


def probe_tokens(model: nn.Module) -> Tensor:
    """Three short sequences `[3, 9]` of arbitrary tokens."""
    vocab = int(text_config(model).vocab_size)
    device = next(model.parameters()).device
    tokens = torch.arange(3 * 9, device=device).view(3, 9) * 7 % (vocab - 1) + 1
    tokens[1, :PREFIX] = tokens[0, :PREFIX]
    return tokens


def own_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits `[B, T, V]` of `tokens` `[B, T]` by the model's own forward, in float32."""
    with decoding(model, None):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def compute_types(model: nn.Module) -> set[torch.dtype]:
    """The types that a forward of the model computes in: its weights' and autocast's."""
    parameter = next(model.parameters())
    types = {parameter.dtype}
    if torch.is_autocast_enabled(parameter.device.type):
        types.add(torch.get_autocast_dtype(parameter.device.type))
    return types


def disagreement(errors: Tensor, own_logps: Tensor, *types: torch.dtype) -> float | None:
    """The mean error relative to the mean log-prob, if rounding to `types` does not explain it.

    `errors` are those of logits or of log-probs, `own_logps` log-probs by the model's own forward.

    >>> own = torch.tensor([0.6, 0.4]).log()
    >>> disagreement(1e-4 * own, own, torch.float32) is None
    True
    >>> disagreement(0.5 * own, own, torch.bfloat16)
    0.5
    """
    # On average, rounding is a small share of a log-prob; wrong positions, masks or adapters are
    # not. NaN fails the comparison as well.
    share = (errors.abs().mean() / own_logps.abs().mean().clamp(min=1e-6)).item()
    narrow = any(dtype.itemsize < 4 for dtype in types)
    return None if share <= (2e-2 if narrow else 1e-3) else share
