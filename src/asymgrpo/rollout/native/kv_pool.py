"""The KV cache for graph decoding: one flat pool per layer, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.decode.decode_attention import Contexts, decode_attention, reference_attention
from .cache_attention import PassThroughCache, Scores
from .prefill import PromptStates


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores per token."""

    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return 2 * self.heads * self.width * self.dtype.itemsize


class KVPool(PassThroughCache):
    """Keys and values `[slots, H, D]` by layer; `contexts` and `slots` say which row uses which."""

    def __init__(self, shapes: dict[int, LayerShape], slots: int, device: torch.device) -> None:
        super().__init__()
        self.size = slots
        self.keys = {
            layer: torch.zeros(slots, shape.heads, shape.width, dtype=shape.dtype, device=device)
            for layer, shape in shapes.items()
        }
        self.values = {layer: torch.zeros_like(keys) for layer, keys in self.keys.items()}
        self.contexts: Contexts | None = None
        self.slots: Tensor | None = None

    def add_prompts(self, states: PromptStates, start: int) -> int:
        """Stores prompts one after another from slot `start` on; returns the slot after them."""
        length = max(states.counts)
        places = [
            group * length + token
            for group, count in enumerate(states.counts)
            for token in range(count)
        ]
        end = start + len(places)
        if not places:
            return end
        taken = torch.tensor(places, device=self.keys[0].device)
        for pool, found in ((self.keys, states.keys), (self.values, states.values)):
            for layer, tensor in found.items():
                flat = tensor.transpose(1, 2).reshape(-1, *pool[layer].shape[1:])
                torch.index_select(flat, 0, taken, out=pool[layer][start:end])
        return end

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        assert self.contexts is not None
        assert self.slots is not None
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self.slots, key[:, :, 0])
        values.index_copy_(0, self.slots, value[:, :, 0])
        attention = decode_attention if query.is_cuda else reference_attention
        out = attention(
            query[:, :, 0], keys, values, self.contexts, how.scaling, how.window, how.softcap
        )
        return out[:, None]
