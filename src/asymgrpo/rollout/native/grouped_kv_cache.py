"""The KV cache for eager decoding: rows in chunks that share a prompt.

A chunk is `n` rows of one group. It stores the prompt's keys and values once, and the rows' query
heads are folded into the query length of one product with them. Sampled tokens are stored per row.
Keys are stored transposed, which makes the small products three times as fast on a CPU.

Letters: `N` chunks of `n` rows, `P` prompt tokens, `H` key heads, `g` query heads per key head, `D`
head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache_attention import PassThroughCache, Scores


def chunk_size(counts: Sequence[int]) -> int:
    """Rows per chunk for groups of these sizes: few empty places, few copies of a prompt.

    >>> chunk_size([8, 8, 8]), chunk_size([8, 7, 8]), chunk_size([1, 1, 5])
    (8, 8, 1)
    """
    sizes = {1 << power for power in range(max(counts).bit_length())} | {max(counts)}

    def cost(size: int) -> float:
        chunks = sum(-(-count // size) for count in counts)
        return chunks * (size + 0.35)

    return min(sorted(sizes), key=cost)


class GroupedKVCache(PassThroughCache):
    """Keys and values of the prompts and of the sampled tokens; all rows are at the same step."""

    def __init__(self, keys: dict[int, Tensor], values: dict[int, Tensor], lengths: Tensor) -> None:
        """Keys and values of the prompts by layer, `[groups, H, P, D]`, and their `lengths`."""
        super().__init__()
        self.prompts = [
            {layer: states.transpose(-1, -2).contiguous() for layer, states in keys.items()},
            values,
        ]
        self.lengths = lengths
        self.step = 0
        self.sampled: list[dict[int, Tensor]] = [{}, {}]
        """Keys `[N * H * n, D, capacity]` and values `[N * H * n, capacity, D]` by layer."""
        self.size = 1
        self.shared: list[dict[int, Tensor]] = [{}, {}]

    def arrange(self, groups: Tensor, size: int, rows: Tensor | None) -> None:
        """Forms chunks of `size` rows of these groups `[N]` from the former places `rows`.

        `rows` is `[N * size]`; a place without a rollout repeats any other one.
        """
        for kind in (0, 1):
            self.shared[kind] = {
                layer: states[groups].flatten(0, 1) for layer, states in self.prompts[kind].items()
            }
            for layer, states in self.sampled[kind].items():
                assert rows is not None
                taken = self._slots(rows, size)
                self.sampled[kind][layer] = states.index_select(0, taken)
        self.size = size
        self.counts = self.lengths[groups]
        longest = max((states.shape[-1] for states in self.prompts[0].values()), default=0)
        self.columns = torch.arange(longest, device=groups.device)
        self.ragged = bool((self.counts != longest).any())

    def _slots(self, rows: Tensor, size: int) -> Tensor:
        """Where the keys of these former places are, in the order of chunks of `size`."""
        chunk, place = rows // self.size, rows % self.size
        head = torch.arange(self._heads, device=rows.device)
        slots = (chunk[:, None] * self._heads + head) * self.size + place[:, None]
        return slots.view(-1, size, self._heads).transpose(1, 2).flatten()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        rows, query_heads, _, width = query.shape
        self._heads = heads = key.shape[1]
        n, g = self.size, query_heads // heads
        keys, values = self._stored(layer, key, value)
        first = 0 if how.window is None else max(0, self.step + 1 - how.window)
        keys, values = keys[..., first : self.step + 1], values[:, first : self.step + 1]
        # [N, H, n, g, D]: views of it serve both the prompt's product and the rows' own.
        q = (query * how.scaling).reshape(-1, n, heads, g, width).transpose(1, 2)
        q = q.reshape(-1, g, width)
        scores = torch.bmm(q, keys)
        prompt = self.shared[0].get(layer)
        if prompt is not None:
            q = q.view(-1, n * g, width)
            scores = torch.cat((torch.bmm(q, prompt).view(len(scores), g, -1), scores), dim=-1)
        weights = self._weights(scores, heads, how).to(value.dtype)
        if prompt is None:
            out = torch.bmm(weights, values)
        else:
            length = prompt.shape[-1]
            spread = weights.view(-1, n * g, weights.shape[-1])[..., :length]
            out = torch.bmm(spread, self.shared[1][layer]).view(-1, g, value.shape[-1])
            out = out.baddbmm_(weights[..., length:], values)
        out = out.view(-1, heads, n, g, value.shape[-1]).transpose(1, 2)
        return out.reshape(rows, 1, query_heads, value.shape[-1])

    def _weights(self, scores: Tensor, heads: int, how: Scores) -> Tensor:
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        length = len(self.columns)
        positions = self.counts + self.step
        slides = how.window is not None and length + self.step >= how.window
        if length and (self.ragged or slides):
            hidden = self.columns >= self.counts[:, None]
            if slides:
                assert how.window is not None
                hidden = hidden | (self.columns <= positions[:, None] - how.window)
            by_chunk = scores.view(len(self.counts), -1, scores.shape[-1])[..., :length]
            by_chunk.masked_fill_(hidden[:, None], -torch.inf)
        return scores.softmax(-1, dtype=torch.float32)

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes this step's keys and values `[rows, H, 1, D]`; returns the layer's buffers."""
        if layer not in self.sampled[0] or self.sampled[0][layer].shape[-1] <= self.step:
            self._grow(layer, key, value)
        keys, values = self.sampled[0][layer], self.sampled[1][layer]
        n, heads = self.size, key.shape[1]
        new_keys = key.reshape(-1, n, heads, key.shape[-1]).transpose(1, 2)
        new_values = value.reshape(-1, n, heads, value.shape[-1]).transpose(1, 2)
        keys.view(-1, heads, n, *keys.shape[1:])[..., self.step] = new_keys
        values.view(-1, heads, n, *values.shape[1:])[..., self.step, :] = new_values
        return keys, values

    def _grow(self, layer: int, key: Tensor, value: Tensor) -> None:
        places = key.shape[0] * key.shape[1]
        capacity = max(64, 2 * self.step)
        keys = key.new_empty(places, key.shape[-1], capacity)
        values = value.new_empty(places, capacity, value.shape[-1])
        if layer in self.sampled[0]:
            keys[..., : self.step] = self.sampled[0][layer]
            values[:, : self.step] = self.sampled[1][layer]
        self.sampled[0][layer], self.sampled[1][layer] = keys, values
