"""Attention over packed rollouts: each token sees its prompt and its own rollout, nothing else.

A packed sequence consists of segments. A segment is a prompt, or a rollout that shares one; its
tokens attend causally to the segment itself and to the whole prompt. Two implementations agree:

- flex attention with a block mask, compiled, on a GPU;
- gathered attention elsewhere (`gathered_attention.py`), which copies queries and keys into one
  padded row per segment.

`NAME` is registered with transformers' attention interface. The layers of a model whose
configuration names it call `packed_attention`; the plan is passed through the model's forward as
the keyword argument `packed`.

N packed tokens, S segments, H heads, K key heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .gathered_attention import gathered_attention, gathered_plan

NAME = "asymgrpo_packed"
BLOCK = 128
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Segments:
    """The bounds of a packed sequence's segments; every array is int64 and on the host.

    Segment s holds the tokens [start, end) and sees the prompt [prompt_start, prompt_end), which is
    empty for a prompt's own segment. Segments cover the sequence without gaps.
    """

    positions: Array  # [N]
    start: Array  # [S], as the others below
    end: Array
    prompt_start: Array
    prompt_end: Array

    @property
    def tokens(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class PackedPlan:
    """A packed sequence's attention masks on one device, one per sliding window."""

    segments: Segments
    device: torch.device
    flex: bool
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def prepare(self, windows: set[int | None]) -> PackedPlan:
        """Builds the masks of these sliding windows; None is full attention."""
        for window in windows:
            make = _block_mask if self.flex else gathered_plan
            self._masks[window] = make(self.segments, self.device, window)
        return self

    def mask(self, window: int | None) -> Any:
        """The mask of a sliding window given to `prepare`."""
        return self._masks[window]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends `query` [1, H, N, D] to `key` and `value` [1, K, N, D]; returns [1, N, H, D]."""
    mask = packed.mask(sliding_window)
    if packed.flex:
        attended = _flex(query, key, value, mask, scaling, softcap)
    else:
        attended = gathered_attention(query, key, value, mask, scaling, softcap)
    return attended, None


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    # Inside a compiled layer, flex attention is compiled with the layer.
    attend = flex_attention if torch.compiler.is_compiling() or not query.is_cuda else _compiled()
    # In the backward pass, one block per key head accumulates a prompt's key gradients over its
    # whole group. Repeating keys per query head spreads that over several times as many blocks.
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    attended = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scaling,
    )
    assert isinstance(attended, Tensor)
    return attended.transpose(1, 2)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def _block_mask(segments: Segments, device: torch.device, window: int | None) -> BlockMask:
    """The mask of token pairs, and the lists of partly and fully visible blocks of `BLOCK` tokens.

    The lists are computed from the segments' bounds: evaluating the mask at every pair of tokens
    would cost more than the attention.
    """
    lengths = segments.end - segments.start
    bounds = torch.from_numpy(
        np.stack([segments.start, segments.prompt_start, segments.prompt_end]).astype(np.int32)
    )
    owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    start, prompt_start, prompt_end = bounds[:, owner].to(device)
    places = torch.from_numpy(segments.positions.astype(np.int32)).to(device)
    touched, filled = _blocks(segments, window)

    if window is None:

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Any:
            return (k <= q) & ((k >= start[q]) | ((k >= prompt_start[q]) & (k < prompt_end[q])))
    else:

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Any:
            visible = (k >= start[q]) | ((k >= prompt_start[q]) & (k < prompt_end[q]))
            return (k <= q) & visible & (places[q] - places[k] < window)

    return BlockMask.from_kv_blocks(
        *_block_lists(touched & ~filled, device),
        *_block_lists(filled, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(segments.tokens, segments.tokens),
    )


def _blocks(segments: Segments, window: int | None) -> tuple[Array, Array]:
    """Blocks of [queries, keys] with any visible pair, and blocks with all pairs visible."""
    count = -(-segments.tokens // BLOCK)
    touched, filled = np.zeros((count, count), bool), np.zeros((count, count), bool)
    for start, end, prompt_start, prompt_end in zip(
        segments.start, segments.end, segments.prompt_start, segments.prompt_end, strict=True
    ):
        if end == start:
            continue
        first, last = start // BLOCK, (end - 1) // BLOCK
        for low, high in ((start, end), (prompt_start, prompt_end)):
            if high > low:
                touched[first : last + 1, low // BLOCK : (high - 1) // BLOCK + 1] = True
                whole_queries = slice(-(-start // BLOCK), end // BLOCK)
                filled[whole_queries, -(-low // BLOCK) : high // BLOCK] = True
    below = np.tri(count, dtype=bool)
    touched &= below
    filled &= below & ~np.eye(count, dtype=bool)
    if window is not None:
        # A block is dropped if even its nearest pair is too far apart. Filled blocks are left to
        # the mask of token pairs.
        first_of_block = np.arange(0, segments.tokens, BLOCK)
        lowest = np.minimum.reduceat(segments.positions, first_of_block)
        highest = np.maximum.reduceat(segments.positions, first_of_block)
        touched &= lowest[:, None] - highest[None, :] < window
        filled[:] = False
    return touched, filled


def _block_lists(blocks: Array, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each row of blocks, how many are set, and the column indices with those first."""
    counts = blocks.sum(1).astype(np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )
