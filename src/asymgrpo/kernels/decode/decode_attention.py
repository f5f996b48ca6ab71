"""Attention of one new token per row over a pool of keys and values.

The pool is flat: a row's context is the slots of its group's prompt, followed by the slots of the
tokens that the row itself has sampled. Lengths are read from device memory, so one captured graph
serves all of them. The query heads of a key head are the rows of one small matrix product, so keys
and values are read once (grouped-query attention without repeats). Keys of earlier tokens are
loaded while the new token's query is still being computed. Each warp takes its own keys, a lane,
with a partial softmax of its own, reduced once at the end. With few rows, the context is split over
blocks as well (split-K), and the last block to finish merges the partial results.

Letters: `B` rows, `S` slots of the pool, `Hq` query heads, `H` key heads, `D` head size, `L` lanes.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import sm_count
from .decode_projection import precision, stand_in
from .decode_qkv import NewTokens, head_values, rope_at
from .pdl import launch, launch_dependents, wait


@dataclass(frozen=True)
class Contexts:
    """Where each row's context is in the pool; int64 `[B]` each."""

    prompt_start: Tensor
    prompt_count: Tensor
    own_start: Tensor
    own_count: Tensor
    """Includes the token that the row is processing."""


@triton.jit
def _tanh(x):
    """Accurate to float32: with a cap of 50, the fast exponential's error would be visible."""
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
def _merged(
    partial,
    heads,
    wide,
    SPLITS: tl.constexpr,
    FOLD: tl.constexpr,
    FOLD_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Softmax denominators and weighted sums of all splits, always merged in the same order.

    The loads bypass L1, which is not coherent with writes from other SMs.
    """
    in_fold = tl.arange(0, FOLD_BLOCK) < FOLD
    store = in_fold[:, None] & (wide < D)[None, :]
    top = tl.full((FOLD_BLOCK,), -1e30, tl.float32)
    for part in tl.static_range(SPLITS):
        at_part = partial + (heads * SPLITS + part) * (D + 2) + D
        part_top = tl.load(at_part, mask=in_fold, other=-1e30, cache_modifier=".cg")
        top = tl.maximum(top, part_top)
    mass = tl.zeros((FOLD_BLOCK,), tl.float32)
    sums = tl.zeros((FOLD_BLOCK, D_BLOCK), tl.float32)
    for part in tl.static_range(SPLITS):
        at_part = partial + (heads * SPLITS + part) * (D + 2)
        part_top = tl.load(at_part + D, mask=in_fold, other=-1e30, cache_modifier=".cg")
        part_mass = tl.load(at_part + D + 1, mask=in_fold, other=1, cache_modifier=".cg")
        at_sums = at_part[:, None] + wide[None, :]
        part_sums = tl.load(at_sums, mask=store, other=0.0, cache_modifier=".cg")
        factor = tl.exp(part_top - top)
        mass += factor * part_mass
        sums += factor[:, None] * part_sums
    return mass, sums


@triton.jit
def _repeated(few, ROWS: tl.constexpr):
    """Rows `[F, W]` repeated to `[ROWS, W]`: tensor cores take no fewer than 16."""
    F: tl.constexpr = few.shape[0]
    W: tl.constexpr = few.shape[1]
    return tl.reshape(tl.broadcast_to(few[None, :, :], (ROWS // F, F, W)), (ROWS, W))


@triton.jit
def _over_lanes(many, LANES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The sum over lanes `[L, R, W]`, with the lanes of an element brought to one thread first.

    A plain `tl.sum` would leave a copy of the whole result in every lane.
    """
    tl.static_assert(LANES == 1 or LANES == 4)
    if LANES == 1:
        return tl.reshape(many, (ROWS, WIDE))
    else:
        pairs = tl.reshape(tl.permute(many, (1, 2, 0)), (ROWS, WIDE, 2, 2))
        first, second = tl.split(pairs)
        third, fourth = tl.split(first + second)
        return third + fourth


@triton.jit
def _attend(
    query,
    bias_q, bias_k, bias_v,
    norm_q, norm_k,
    cos, sin,
    keys, values,
    prompt_start, prompt_count, own_start, own_count,
    out,
    partial, arrived,
    M,
    scaling, softcap, window,
    HEADS: tl.constexpr,
    FOLD: tl.constexpr,
    FEW: tl.constexpr,
    FOLD_BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    EPSILON: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """With `PARTS` > 0, also computes the new token's query, key and value from partial sums.

    That happens in the first iteration, after the loads of the first keys and values were issued.
    There is one iteration even where there are no earlier keys.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = out.dtype.element_ty
    prompt = tl.load(prompt_count + row)
    own = tl.load(own_count + row)
    first_own = tl.load(own_start + row)
    first_prompt = tl.load(prompt_start + row)
    total = prompt + own
    hidden = tl.maximum(total - window, 0)
    fold = tl.arange(0, FOLD_BLOCK)
    wide = tl.arange(0, D_BLOCK)
    in_d = wide < D
    in_fold = fold < FOLD
    heads = (row * HEADS + head) * FOLD + fold
    store = in_fold[:, None] & in_d[None, :]
    lane = tl.arange(0, LANES)
    within = tl.arange(0, BLOCK // LANES)
    tops = tl.full((LANES, FOLD_BLOCK), -1e30, tl.float32)
    masses = tl.zeros((LANES, FOLD_BLOCK), tl.float32)
    sums = tl.zeros((LANES, FOLD_BLOCK, D_BLOCK), tl.float32)
    if PARTS == 0:
        wait(PDL)
        made = tl.load(query + heads[:, None] * D + wide[None, :], mask=store, other=0.0)
        q = tl.broadcast_to(made[None, :, :], (LANES, FOLD_BLOCK, D_BLOCK))
    else:
        TOTAL: tl.constexpr = (FOLD + 2) * HEADS * D
        cosine, sine = rope_at(cos, sin, total - 1, wide, D, ROPE)
        parts = query + row * TOTAL
        few = tl.arange(0, FEW)
        q = tl.zeros((LANES, FOLD_BLOCK, D_BLOCK), DTYPE)
        v_new = tl.zeros((FEW, D_BLOCK), DTYPE)
        score = tl.full((FEW,), -1e30, tl.float32)
        # The new token is the last of its context. The first split handles it.
        total = total - 1
    share = tl.cdiv(tl.cdiv(total - hidden, BLOCK), SPLITS) * BLOCK
    start = hidden + split * share
    end = tl.minimum(start + share, total)
    for begin in range(start, tl.maximum(end, start + 1), BLOCK):
        index = begin + lane[:, None] * (BLOCK // LANES) + within[None, :]
        slot = index + tl.where(index < prompt, first_prompt, first_own - prompt)
        inside = index < end
        at = ((slot * HEADS + head) * D)[:, :, None] + wide[None, None, :]
        mask = inside[:, :, None] & in_d[None, None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
        if PARTS > 0:  # noqa: SIM102 (a constexpr, unlike the next condition)
            if begin == start:
                wait(PDL)
                # The key and value in every row, so that products need no layout conversion.
                made = head_values(
                    parts, head * FOLD + few, 0, few < FOLD, M * TOTAL, bias_q, norm_q, cosine,
                    sine, wide, D, PARTS, BIAS, NORM, ROPE, EPSILON, DTYPE,
                )  # fmt: skip
                k_new = head_values(
                    parts, few * 0 + head, HEADS * FOLD * D, few < FEW, M * TOTAL, bias_k, norm_k,
                    cosine, sine, wide, D, PARTS, BIAS, NORM, ROPE, EPSILON, DTYPE,
                )  # fmt: skip
                v_new = head_values(
                    parts, few * 0 + head, HEADS * (FOLD + 1) * D, few < FEW, M * TOTAL, bias_v,
                    norm_k, cosine, sine, wide, D, PARTS, BIAS, False, False, EPSILON, DTYPE,
                )  # fmt: skip
                many = _repeated(made, FOLD_BLOCK)[None, :, :]
                many = tl.broadcast_to(many, (LANES, FOLD_BLOCK, D_BLOCK)).to(tl.float32)
                # Adding the sums, which are zero here, gives it the layout that the dot products
                # want; otherwise every iteration would convert it.
                q = (sums + many).to(DTYPE)
                score = tl.sum(made.to(tl.float32) * k_new.to(tl.float32), 1) * scaling
                if SOFTCAP:
                    score = _tanh(score / softcap) * softcap
                if split == 0:
                    slot_new = few[:, None] * 0 + (first_own + own - 1)
                    at_new = (slot_new * HEADS + head) * D + wide[None, :]
                    once = (few == 0)[:, None] & in_d[None, :]
                    tl.store(keys + at_new, k_new, mask=once)
                    tl.store(values + at_new, v_new, mask=once)
        scores = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision=PRECISION) * scaling
        if SOFTCAP:
            scores = _tanh(scores / softcap) * softcap
        scores = tl.where(inside[:, None, :], scores, -1e30)
        higher = tl.maximum(tops, tl.max(scores, 2))
        decay = tl.exp(tops - higher)
        weights = tl.where(inside[:, None, :], tl.exp(scores - higher[:, :, None]), 0.0)
        masses = masses * decay + tl.sum(weights, 2)
        sums = sums * decay[:, :, None]
        sums = tl.dot(weights.to(v.dtype), v, sums, input_precision=PRECISION)
        tops = higher
    launch_dependents(PDL)
    top = tl.max(tops, 0)
    if PARTS > 0:
        newest = tl.reshape(_repeated(score[:, None], FOLD_BLOCK), (FOLD_BLOCK,))
        newest = tl.where(split == 0, newest, -1e30)
        top = tl.maximum(top, newest)
    factors = tl.exp(tops - top[None, :])
    mass = tl.sum(factors * masses, 0)
    merged = _over_lanes(factors[:, :, None] * sums, LANES, FOLD_BLOCK, D_BLOCK)
    if PARTS > 0:
        weight = tl.where(split == 0, tl.exp(newest - top), 0.0)
        mass += weight
        merged += weight[:, None] * _repeated(v_new, FOLD_BLOCK).to(tl.float32)
    to = out + heads[:, None] * D + wide[None, :]
    if SPLITS == 1:
        tl.store(to, (merged / mass[:, None]).to(DTYPE), mask=store)
    else:
        at_split = (heads * SPLITS + split) * (D + 2)
        tl.store(partial + at_split[:, None] + wide[None, :], merged, mask=store)
        tl.store(partial + at_split + D, top, mask=in_fold)
        tl.store(partial + at_split + D + 1, mass, mask=in_fold)
        tl.debug_barrier()
        others = tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel")
        if others == SPLITS - 1:
            mass, merged = _merged(partial, heads, wide, SPLITS, FOLD, FOLD_BLOCK, D, D_BLOCK)
            tl.store(to, (merged / mass[:, None]).to(DTYPE), mask=store)


def lanes_for(width: int, dtype: torch.dtype) -> int:
    """Lanes for heads of this size: registers hold four lanes of 16-bit values up to size 128.

    >>> lanes_for(128, torch.bfloat16), lanes_for(128, torch.float32)
    (4, 1)
    """
    return 4 if width <= 128 and dtype.itemsize == 2 else 1


def block_for(width: int, dtype: torch.dtype) -> int:
    """Keys per iteration for heads of this size, so that four stages of them fit shared memory.

    >>> [block_for(width, torch.bfloat16) for width in (64, 128, 256)]
    [64, 64, 32]
    >>> [block_for(width, torch.float32) for width in (64, 128, 256)]
    [64, 32, 16]
    """
    return max(16, 64 * 256 // max(256, width * dtype.itemsize))


def splits_for(rows: int, heads: int, sms: int) -> int:
    """Parts that a row's context is split into, so that few rows still fill `sms` multiprocessors.

    >>> [splits_for(rows, heads=2, sms=132) for rows in (128, 64, 16, 1)]
    [1, 1, 4, 16]
    """
    parts = 1
    while parts < 16 and 2 * parts * rows * heads <= sms:
        parts *= 2
    return parts


def decode_attention(
    query: Tensor | NewTokens,
    keys: Tensor,
    values: Tensor,
    contexts: Contexts,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Queries `[B, Hq, D]` over the pool's keys and values `[S, H, D]` to outputs `[B, Hq, D]`.

    Given `NewTokens` instead of queries, it computes the queries itself and writes each token's key
    and value to the pool, as the last of its row's own. `arrived` are zeros, int32 `[B * H]`, used
    up by the call.
    """
    if isinstance(query, NewTokens):
        shape = query.parts.shape[1], query.query_heads, keys.shape[2]
    else:
        shape = query.shape[0], query.shape[1], query.shape[2]
    rows, query_heads, width = shape
    heads = keys.shape[1]
    if query_heads % heads or keys.shape != values.shape or keys.shape[2] != width:
        raise ValueError(f"queries {shape}, keys {keys.shape}, values {values.shape}")
    out = torch.empty(shape, dtype=keys.dtype, device=keys.device)
    if isinstance(query, NewTokens):
        arguments, options = query.arguments(out), query.options()
    else:
        # Stand-ins for three biases, two norms and two RoPE tables, which are not read.
        arguments = (query.contiguous(), *[out] * 7)
        options = {"PARTS": 0, "BIAS": False, "NORM": False, "ROPE": False, "EPSILON": 0.0}
    fold = query_heads // heads
    few = max(2, triton.next_power_of_2(fold))
    sms = sm_count(out.device)
    splits = splits_for(rows, heads, sms) if splits is None else splits
    wide = triton.next_power_of_2(width)
    # Without splits there is nothing to merge, and any tensor stands in.
    partial = out
    if splits > 1:
        size = rows * query_heads * splits * (width + 2)
        partial = torch.empty(size, dtype=torch.float32, device=out.device)
        if arrived is None:
            arrived = torch.zeros(rows * heads, dtype=torch.int32, device=out.device)
    launch(
        _attend,
        (rows, heads, splits),
        out.device,
        *arguments,
        keys,
        values,
        contexts.prompt_start,
        contexts.prompt_count,
        contexts.own_start,
        contexts.own_count,
        out,
        partial,
        stand_in(arrived, out),
        rows,
        scaling,
        softcap or 1.0,
        window or 1 << 30,
        HEADS=heads,
        FOLD=fold,
        FEW=few,
        FOLD_BLOCK=max(16, few),
        D=width,
        D_BLOCK=wide,
        BLOCK=block_for(wide, out.dtype),
        LANES=lanes_for(wide, out.dtype),
        SPLITS=splits,
        SOFTCAP=softcap is not None,
        PRECISION=precision(out),
        **options,
        num_warps=4,
        # Two blocks share an SM's memory where there are more blocks than SMs.
        num_stages=3 if rows * heads * splits > sms else 4,
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
