"""The attention function of models that the engine runs, and the cache of the prefill.

transformers passes each layer's queries, keys and values to the function registered as ATTENTION,
which passes them to the active cache. transformers builds no mask for an attention implementation
without a mask function, so the caches do the masking.

Letters: `B` rows, `T` tokens, `Hq` query heads, `H` key heads, `D` head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache

ATTENTION = "asymgrpo"


@dataclass(frozen=True)
class Scores:
    """How a layer computes attention scores from products of queries and keys."""

    scaling: float
    window: int | None = None
    """Keys that a query sees, its own included; None for all up to its own."""
    softcap: float | None = None


class AttendingCache(Protocol):
    """A cache that also computes attention."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        """Queries `[B, Hq, T, D]`, new keys and values `[B, H, T, D]` to `[B, T, Hq, D]`."""
        ...


_active: list[AttendingCache] = []


@contextmanager
def attending_to(cache: AttendingCache) -> Iterator[None]:
    """Within the block, layers attend to this cache."""
    _active.append(cache)
    try:
        yield
    finally:
        _active.pop()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    extra = sorted(name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None)
    if extra or attention_mask is not None:
        raise NotImplementedError(f"attention with {', '.join(extra) or 'a mask'}")
    how = Scores(scaling or query.shape[-1] ** -0.5, sliding_window, softcap)
    layer: Any = module.layer_idx
    return _active[-1].attend(layer, query, key, value, how), None


AttentionInterface.register(ATTENTION, _attention)


class PassThroughCache(Cache):
    """The cache that a model sees: it passes keys and values through, and `attend` stores them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class PrefillCache(PassThroughCache):
    """Causal attention over right-padded prompts, which stores their keys and values.

    Padding comes after the real tokens, so causality alone hides it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, Tensor] = {}
        """Layer to `[B, H, T, D]`."""
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        self.keys[layer], self.values[layer] = key, value
        return causal_attention(query, key, value, how).transpose(1, 2).contiguous()


def causal_attention(query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
    """Queries `[B, Hq, T, D]` over keys and values `[B, H, T, D]` of the same positions.

    >>> q = torch.randn(1, 4, 3, 8); k = torch.randn(1, 2, 3, 8); v = torch.randn(1, 2, 3, 8)
    >>> out = causal_attention(q, k, v, Scores(8**-0.5))
    >>> bool(torch.allclose(out[0, :2, 0], v[0, :1, 0].expand(2, 8)))
    True
    """
    grouped = query.shape[1] != key.shape[1]
    length = query.shape[2]
    mask = None
    if how.window is not None and how.window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - how.window)
    if how.softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=how.scaling, enable_gqa=grouped
        )
    batch, heads = key.shape[:2]
    folded = query.reshape(batch, heads, -1, length, query.shape[-1])
    scores = (folded @ key[:, :, None].transpose(-1, -2)) * how.scaling
    scores = torch.tanh(scores / how.softcap) * how.softcap
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype) @ value[:, :, None]).reshape(query.shape)
