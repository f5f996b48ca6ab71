"""Attention of one new token a row over a pool of keys and values.

The pool is flat: a row's context is the slots of its group's prompt followed by those that the row
itself has sampled. Lengths are read from device memory, so that one captured graph serves all of
them; the query heads of a key head are the rows of one small matrix product, so that keys and
values are read once and never repeated.

Letters: `B` rows, `S` slots of the pool, `Hq` query heads, `H` key heads, `D` head size.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chaining import call_next, chained, follow


@dataclass(frozen=True)
class Contexts:
    """Where each row's context lies in the pool; int64 `[B]` each."""

    prompt_start: Tensor
    prompt_count: Tensor
    own_start: Tensor
    own_count: Tensor
    """The token that the row is taking in included."""


@triton.jit
def _tanh(x):
    """To float32's own precision: a cap of 50 makes the error of the fast exponential visible."""
    y = 2.0 * tl.abs(x)
    n = tl.floor(y * 1.4426950408889634 + 0.5)
    # exp(-y) = 2^-n (1 + m) with |t| at most half of log 2, whose high bits are subtracted exactly.
    t = n * 0.693359375 - y + n * -2.12194440e-4
    m = 1.0 / 120 + t * (1.0 / 720 + t * (1.0 / 5040))
    m = t * (1.0 + t * (0.5 + t * (1.0 / 6 + t * (1.0 / 24 + t * m))))
    ratio = tl.exp2(-n) * (1.0 + m)
    value = tl.where(n == 0, -m, 1.0 - ratio) / (1.0 + ratio)
    return tl.where(x < 0, -value, value)


@triton.jit
def _attend(
    query,
    keys,
    values,
    prompt_start,
    prompt_count,
    own_start,
    own_count,
    out,
    partial,
    scaling,
    softcap,
    window,
    HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prompt = tl.load(prompt_count + row)
    total = prompt + tl.load(own_count + row)
    first_prompt = tl.load(prompt_start + row)
    first_own = tl.load(own_start + row) - prompt
    hidden = tl.maximum(total - window, 0)
    blocks = tl.cdiv(total - hidden, BLOCK)
    share = tl.cdiv(blocks, SPLITS) * BLOCK
    start = hidden + split * share
    end = tl.minimum(start + share, total)

    fold = tl.arange(0, FOLD_BLOCK)
    wide = tl.arange(0, D_BLOCK)
    in_d = wide < D
    heads = (row * HEADS + head) * FOLD + fold
    in_fold = fold < FOLD
    q = tl.load(
        query + heads[:, None] * D + wide[None, :], mask=in_fold[:, None] & in_d[None, :], other=0.0
    )
    top = tl.full((FOLD_BLOCK,), -1e30, tl.float32)
    mass = tl.zeros((FOLD_BLOCK,), tl.float32)
    sums = tl.zeros((FOLD_BLOCK, D_BLOCK), tl.float32)
    for begin in range(start, end, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        slot = index + tl.where(index < prompt, first_prompt, first_own)
        inside = index < end
        at = (slot * HEADS + head) * D
        mask = inside[:, None] & in_d[None, :]
        k = tl.load(keys + at[:, None] + wide[None, :], mask=mask, other=0.0)
        v = tl.load(values + at[:, None] + wide[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP:
            scores = _tanh(scores / softcap) * softcap
        scores = tl.where(inside[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp(top - higher)
        weights = tl.where(inside[None, :], tl.exp(scores - higher[:, None]), 0.0)
        mass = mass * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None]
        sums += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    call_next(CHAINED)
    store = in_fold[:, None] & in_d[None, :]
    if SPLITS == 1:
        result = sums / mass[:, None]
        tl.store(
            out + heads[:, None] * D + wide[None, :], result.to(out.dtype.element_ty), mask=store
        )
    else:
        at_split = (heads * SPLITS + split) * (D + 2)
        tl.store(partial + at_split[:, None] + wide[None, :], sums, mask=store)
        tl.store(partial + at_split + D, top, mask=in_fold)
        tl.store(partial + at_split + D + 1, mass, mask=in_fold)


@triton.jit
def _merge(
    partial,
    out,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    call_next(CHAINED)
    head = tl.program_id(0)
    wide = tl.arange(0, D_BLOCK)
    in_d = wide < D
    splits = tl.arange(0, SPLITS)
    at = (head * SPLITS + splits) * (D + 2)
    top = tl.load(partial + at + D)
    factor = tl.exp(top - tl.max(top, 0))
    mass = tl.sum(factor * tl.load(partial + at + D + 1), 0)
    sums = tl.load(partial + at[:, None] + wide[None, :], mask=in_d[None, :], other=0.0)
    result = tl.sum(sums * factor[:, None], 0) / mass
    tl.store(out + head * D + wide, result.to(out.dtype.element_ty), mask=in_d)


def splits_for(rows: int, heads: int, processors: int = 132) -> int:
    """Parts that a row's context is cut into, so that few rows still fill the device.

    >>> splits_for(128, 2), splits_for(16, 2), splits_for(1, 2)
    (1, 8, 16)
    """
    parts = 1
    while parts < 16 and 2 * parts * rows * heads <= 2 * processors:
        parts *= 2
    return parts


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    contexts: Contexts,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """Queries `[B, Hq, D]` over the pool's keys and values `[S, H, D]` to outputs `[B, Hq, D]`."""
    rows, query_heads, width = query.shape
    heads = keys.shape[1]
    if query_heads % heads or keys.shape != values.shape or keys.shape[2] != width:
        raise ValueError(f"queries {query.shape}, keys {keys.shape}, values {values.shape}")
    fold = query_heads // heads
    splits = splits_for(rows, heads) if splits is None else splits
    wide = triton.next_power_of_2(width)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # Without parts there is nothing to merge, and any tensor stands in for them.
    partial = out
    if splits > 1:
        partial = torch.empty(
            rows * query_heads * splits * (width + 2), dtype=torch.float32, device=query.device
        )
    _attend[(rows, heads, splits)](
        query.contiguous(),
        keys,
        values,
        contexts.prompt_start,
        contexts.prompt_count,
        contexts.own_start,
        contexts.own_count,
        out,
        partial,
        scaling,
        softcap or 1.0,
        window or 1 << 30,
        HEADS=heads,
        FOLD=fold,
        FOLD_BLOCK=max(16, triton.next_power_of_2(fold)),
        D=width,
        D_BLOCK=wide,
        BLOCK=64 if wide <= 128 else 32,
        SPLITS=splits,
        SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **chained(query.device),
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _merge[(rows * query_heads,)](
            partial,
            out,
            D=width,
            D_BLOCK=wide,
            SPLITS=splits,
            **chained(query.device),
            num_warps=2,
        )
    return out


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    contexts: Contexts,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition of `decode_attention`, row by row.

    >>> one = torch.ones(1, dtype=torch.long)
    >>> pool = torch.randn(4, 1, 8)
    >>> contexts = Contexts(0 * one, 0 * one, one, one)
    >>> out = reference_attention(torch.randn(1, 2, 8), pool, pool, contexts, 1.0)
    >>> bool(torch.allclose(out[0, 1], pool[1, 0]))
    True
    """
    out = torch.empty_like(query)
    for row in range(len(query)):
        slots = torch.cat(
            [
                torch.arange(int(start[row]), int(start[row]) + int(count[row]))
                for start, count in (
                    (contexts.prompt_start, contexts.prompt_count),
                    (contexts.own_start, contexts.own_count),
                )
            ]
        ).to(query.device)
        slots = slots[-(window or len(slots)) :]
        fold = query.shape[1] // keys.shape[1]
        k = keys[slots].repeat_interleave(fold, 1)
        v = values[slots].repeat_interleave(fold, 1)
        scores = torch.einsum("hd,shd->hs", query[row], k) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
    return out
