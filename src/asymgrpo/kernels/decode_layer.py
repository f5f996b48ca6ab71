"""The rest of a decoding step's layer: root-mean-square norms, rotary positions, the pool's slots.

Each kernel first sums the parts that the projection before it leaves.

Letters: `B` rows, `N` width, `P` parts, `Hq` query heads, `H` key heads, `D` head size.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chaining import call_next, chained, follow
from .decode_projection import stand_in


@triton.jit
def _add_norm(
    hidden,
    parts,
    bias,
    weight,
    normed,
    M,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    EPSILON: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    call_next(CHAINED)
    row = tl.program_id(0)
    columns = tl.arange(0, N_BLOCK)
    mask = columns < N
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    value = tl.load(hidden + row * N + columns, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros((N_BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + (part * M + row) * N + columns, mask=mask, other=0.0)
        if BIAS:
            added += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        value = (value + added.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        tl.store(hidden + row * N + columns, value.to(DTYPE), mask=mask)
    mean = tl.sum(value * value, 0) / N
    scaled = (value * tl.rsqrt(mean + EPSILON)).to(DTYPE).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * N + columns, (scaled * scale).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _place(
    parts,
    bias_q, bias_k, bias_v,
    norm_q, norm_k,
    cos, sin,
    positions, slots,
    query, keys, values,
    M,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    EPSILON: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    call_next(CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    TOTAL: tl.constexpr = (HQ + 2 * H) * D
    DTYPE: tl.constexpr = query.dtype.element_ty
    half = tl.arange(0, HALF)
    mask = half < D // 2
    left = tl.zeros((HALF,), tl.float32)
    right = tl.zeros((HALF,), tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + (part * M + row) * TOTAL + head * D + half
        left += tl.load(at, mask=mask, other=0.0)
        right += tl.load(at + D // 2, mask=mask, other=0.0)
    bias, norm, place = bias_q, norm_q, head
    if head >= HQ + H:
        bias, place = bias_v, head - HQ - H
    elif head >= HQ:
        bias, norm, place = bias_k, norm_k, head - HQ
    if BIAS:
        left += tl.load(bias + place * D + half, mask=mask, other=0.0).to(tl.float32)
        right += tl.load(bias + place * D + D // 2 + half, mask=mask, other=0.0).to(tl.float32)
    left = left.to(DTYPE).to(tl.float32)
    right = right.to(DTYPE).to(tl.float32)
    if head < HQ + H:
        if NORM:
            mean = (tl.sum(left * left, 0) + tl.sum(right * right, 0)) / D
            scale = tl.rsqrt(mean + EPSILON)
            left_norm = tl.load(norm + half, mask=mask, other=0.0).to(tl.float32)
            right_norm = tl.load(norm + D // 2 + half, mask=mask, other=0.0).to(tl.float32)
            left = ((left * scale).to(DTYPE).to(tl.float32) * left_norm).to(DTYPE).to(tl.float32)
            right = ((right * scale).to(DTYPE).to(tl.float32) * right_norm).to(DTYPE).to(tl.float32)
        if ROTATE:
            angle = tl.load(positions + row) * D + half
            left_cos = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
            left_sin = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
            right_cos = tl.load(cos + angle + D // 2, mask=mask, other=0.0).to(tl.float32)
            right_sin = tl.load(sin + angle + D // 2, mask=mask, other=0.0).to(tl.float32)
            turned = left * left_cos - right * left_sin
            right = right * right_cos + left * right_sin
            left = turned
    if head < HQ:
        to = query + (row * HQ + head) * D + half
    else:
        slot = tl.load(slots + row)
        to = keys + (slot * H + place) * D + half
        if head >= HQ + H:
            to = values + (slot * H + place) * D + half
    tl.store(to, left.to(DTYPE), mask=mask)
    tl.store(to + D // 2, right.to(DTYPE), mask=mask)


def add_norm(
    hidden: Tensor,
    parts: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Adds the sum of `parts` `[P, B, N]` to `hidden` `[B, N]` in place, and returns its norm."""
    rows, width = hidden.shape
    normed = torch.empty_like(hidden, dtype=dtype)
    _add_norm[(rows,)](
        hidden,
        stand_in(parts, hidden),
        stand_in(bias, hidden),
        weight,
        normed,
        rows,
        N=width,
        N_BLOCK=triton.next_power_of_2(width),
        PARTS=0 if parts is None else parts.shape[0],
        BIAS=bias is not None,
        EPSILON=epsilon,
        **chained(hidden.device),
        num_warps=8,
    )
    return normed


def place(
    parts: Tensor,
    biases: Sequence[Tensor | None],
    norms: Sequence[Tensor | None],
    epsilon: float,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
) -> Tensor:
    """Parts `[P, B, (Hq + 2 H) D]` of queries, keys and values to rotated queries `[B, Hq, D]`.

    Keys and values go to the pool `[S, H, D]` at `slots` `[B]`. `biases` has three entries, `norms`
    two; `rotation` is cosines and sines `[P, D]`, of which `positions` `[B]` says the rows' own.
    """
    rows, heads, width = parts.shape[1], keys.shape[1], keys.shape[2]
    query = torch.empty(rows, query_heads, width, dtype=keys.dtype, device=keys.device)
    cos, sin = rotation if rotation is not None else (query, query)
    _place[(rows, query_heads + 2 * heads)](
        parts,
        *[stand_in(bias, query) for bias in biases],
        *[stand_in(norm, query) for norm in norms],
        cos,
        sin,
        positions,
        slots,
        query,
        keys,
        values,
        rows,
        HQ=query_heads,
        H=heads,
        D=width,
        HALF=triton.next_power_of_2(width // 2),
        PARTS=parts.shape[0],
        BIAS=biases[0] is not None,
        NORM=norms[0] is not None,
        ROTATE=rotation is not None,
        EPSILON=epsilon,
        **chained(keys.device),
        num_warps=1,
    )
    return query
