"""The rest of a decoding step's layer: projections with their low-rank adapters in one pass over
the weights, root-mean-square norms, rotary positions, and the gated activation.

With few rows a step is bound by reading the weights and by the number of launches. A projection
streams its weights once, works out the adapter's `x A^T` in the same loop, and adds `B` at the end:
no launch, no copy and no merge for an adapter. The reduction over `K` is split over programs, and
the parts are summed by the kernel that comes next anyway.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank, `D` head size; weights are `[N, K]`.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED_MEMORY = 220_000
MOST_RANK = 128
"""The highest rank of an adapter that the kernels take."""


@dataclass(frozen=True)
class Projection:
    """A linear map on the module's own tensors, with its adapter if there is one."""

    weight: Tensor
    """`[N, K]`."""
    bias: Tensor | None = None
    down: Tensor | None = None
    """The adapter's `A`, `[R, K]`."""
    up: Tensor | None = None
    """The adapter's `B`, `[N, R]`."""
    scaling: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]


@triton.jit(do_not_specialize=["rank0", "rank1", "rank2"])
def _project(
    x,
    w0, w1, w2,
    down0, down1, down2,
    up0, up1, up2,
    scale0, scale1, scale2,
    rank0, rank1, rank2,
    n0, n1, n2,
    out,
    M,
    K,
    share,
    SEGMENTS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    FULL_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, split, strip = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total = n0 + n1 + n2
    w, down, up, scale, rank, n, first = w0, down0, up0, scale0, rank0, n0, n0 - n0
    if SEGMENTS > 1:
        tiles0 = tl.cdiv(n0, BN)
        tiles1 = tl.cdiv(n1, BN)
        if tile >= tiles0 + tiles1:
            w, down, up, scale, rank, n, first = w2, down2, up2, scale2, rank2, n2, n0 + n1
            tile = tile - tiles0 - tiles1
        elif tile >= tiles0:
            w, down, up, scale, rank, n, first = w1, down1, up1, scale1, rank1, n1, n0
            tile = tile - tiles0
    rows = strip * BM + tl.arange(0, BM)
    columns = tile * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    ranks = tl.arange(0, R_BLOCK)
    # Columns past the end repeat the last one, so that the loop needs no mask for them.
    held = tl.minimum(columns, n - 1)
    held_rows = tl.minimum(rows, M - 1)
    begin = split * share
    end = tl.minimum(begin + share, K)
    sums = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(begin, end, BK):
        at = k + inner
        if EVEN:
            xk = tl.load(x + held_rows[:, None] * K + at[None, :])
            wk = tl.load(w + held[:, None] * K + at[None, :])
        else:
            inside = at < end
            xk = tl.load(x + held_rows[:, None] * K + at[None, :], mask=inside[None, :], other=0.0)
            wk = tl.load(w + held[:, None] * K + at[None, :], mask=inside[None, :], other=0.0)
        sums = tl.dot(xk, tl.trans(wk.to(xk.dtype)), sums, input_precision=PRECISION)
        if R_BLOCK > 1:
            where_down = down + ranks[:, None] * K + at[None, :]
            if EVEN and FULL_RANK:
                ak = tl.load(where_down)
            else:
                inside_down = (ranks < rank)[:, None] & (at < end)[None, :]
                ak = tl.load(where_down, mask=inside_down, other=0.0)
            low = tl.dot(xk, tl.trans(ak.to(xk.dtype)), low, input_precision=PRECISION)
    if R_BLOCK > 1:
        tile_up = tl.load(
            up + held[:, None] * rank + ranks[None, :], mask=(ranks < rank)[None, :], other=0.0
        )
        narrow = low.to(x.dtype.element_ty)
        grown = tl.trans(tile_up.to(x.dtype.element_ty))
        sums += tl.dot(narrow, grown, input_precision=PRECISION) * scale
    where = (split * M + rows[:, None]) * total + first + columns[None, :]
    tl.store(out + where, sums, mask=(rows < M)[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["rank_gate", "rank_up"])
def _gate(
    x,
    gate, up,
    down_gate, down_up,
    up_gate, up_up,
    scale_gate, scale_up,
    rank_gate, rank_up,
    out,
    M,
    N,
    K,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    ranks = tl.arange(0, R_BLOCK)
    held = tl.minimum(columns, N - 1)
    held_rows = tl.minimum(rows, M - 1)
    gates = tl.zeros((BM, BN), tl.float32)
    ups = tl.zeros((BM, BN), tl.float32)
    low_gate = tl.zeros((BM, R_BLOCK), tl.float32)
    low_up = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(0, K, BK):
        at = k + inner
        if EVEN:
            xk = tl.load(x + held_rows[:, None] * K + at[None, :])
            gk = tl.load(gate + held[:, None] * K + at[None, :])
            uk = tl.load(up + held[:, None] * K + at[None, :])
        else:
            inside = (at < K)[None, :]
            xk = tl.load(x + held_rows[:, None] * K + at[None, :], mask=inside, other=0.0)
            gk = tl.load(gate + held[:, None] * K + at[None, :], mask=inside, other=0.0)
            uk = tl.load(up + held[:, None] * K + at[None, :], mask=inside, other=0.0)
        gates = tl.dot(xk, tl.trans(gk.to(xk.dtype)), gates, input_precision=PRECISION)
        ups = tl.dot(xk, tl.trans(uk.to(xk.dtype)), ups, input_precision=PRECISION)
        if R_BLOCK > 1:
            where = ranks[:, None] * K + at[None, :]
            inside = (at < K)[None, :]
            ag = tl.load(down_gate + where, mask=(ranks < rank_gate)[:, None] & inside, other=0.0)
            au = tl.load(down_up + where, mask=(ranks < rank_up)[:, None] & inside, other=0.0)
            low_gate = tl.dot(xk, tl.trans(ag.to(xk.dtype)), low_gate, input_precision=PRECISION)
            low_up = tl.dot(xk, tl.trans(au.to(xk.dtype)), low_up, input_precision=PRECISION)
    DTYPE: tl.constexpr = x.dtype.element_ty
    if R_BLOCK > 1:
        bg = tl.load(
            up_gate + held[:, None] * rank_gate + ranks[None, :],
            mask=(ranks < rank_gate)[None, :],
            other=0.0,
        )
        bu = tl.load(
            up_up + held[:, None] * rank_up + ranks[None, :],
            mask=(ranks < rank_up)[None, :],
            other=0.0,
        )
        grown = tl.dot(low_gate.to(DTYPE), tl.trans(bg.to(DTYPE)), input_precision=PRECISION)
        gates += grown * scale_gate
        grown = tl.dot(low_up.to(DTYPE), tl.trans(bu.to(DTYPE)), input_precision=PRECISION)
        ups += grown * scale_up
    # Rounded where the modules round: after each projection and after the activation.
    gates = gates.to(DTYPE).to(tl.float32)
    active = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    result = active * ups.to(DTYPE).to(tl.float32)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], result.to(DTYPE), mask=mask)


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
):
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
    slots,
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
):  # fmt: skip
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
            angle = row * D + half
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


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a projection."""

    bm: int
    bn: int
    bk: int
    splits: int
    warps: int
    stages: int


def tiles_for(rows: int, outputs: int, inputs: int, processors: int = 132) -> Tiles:
    """Blocks for a projection: parts enough to fill the device, none without work.

    >>> tiles_for(128, 1536, 8960).splits > 1
    True
    """
    bm = _row_block(rows)
    bn, bk = (128 if rows > 128 else 64), 64
    tiles = -(-outputs // bn) * -(-rows // bm)
    splits = max(1, min(2 * processors // tiles, inputs // (6 * bk)))
    return Tiles(bm, bn, bk, splits, 8 if rows > 128 else 4, 4 if bm == 128 else 5)


def gate_tiles(rows: int) -> Tiles:
    """Blocks for the gated activation, by what was fastest on an H200.

    >>> gate_tiles(128).bn, gate_tiles(16).bn
    (128, 32)
    """
    bm = _row_block(rows)
    if bm == 128:
        return Tiles(bm, 128, 64, 1, 8, 4)
    return Tiles(bm, 64 if bm == 64 else 32, 64, 1, 4, 4)


def _row_block(rows: int) -> int:
    return min(128, max(16, int(triton.next_power_of_2(rows))))


def _rank_block(rank: int) -> int:
    """Ranks as the matrix units take them; 1 where there is no adapter."""
    return max(16, int(triton.next_power_of_2(rank))) if rank else 1


def project(x: Tensor, projections: Sequence[Projection], tiles: Tiles | None = None) -> Tensor:
    """Rows `[B, K]` through one to three maps of the same input, to parts `[P, B, N0 + N1 + N2]`.

    The sum over parts, in float32 and without biases, is the result.
    """
    if not 1 <= len(projections) <= 3:
        raise ValueError(f"one to three projections, not {len(projections)}")
    rows, inputs = x.shape
    outputs = [projection.weight.shape[0] for projection in projections]
    tiles = tiles or tiles_for(rows, sum(outputs), inputs)
    rank = max(projection.rank for projection in projections)
    stages = _stages(tiles, x, projections[0].weight, 1, _rank_block(rank))
    share = triton.cdiv(triton.cdiv(inputs, tiles.splits), tiles.bk) * tiles.bk
    splits = triton.cdiv(inputs, share)
    out = torch.empty(splits, rows, sum(outputs), dtype=torch.float32, device=x.device)
    three = [*projections, *[projections[0]] * (3 - len(projections))]
    sizes = [*outputs, *[0] * (3 - len(projections))]
    grid = (
        sum(triton.cdiv(size, tiles.bn) for size in outputs),
        splits,
        triton.cdiv(rows, tiles.bm),
    )
    _project[grid](
        x,
        *[projection.weight for projection in three],
        *_adapters([projection.down for projection in three], x),
        *_adapters([projection.up for projection in three], x),
        *[projection.scaling for projection in three],
        *[projection.rank for projection in three],
        *sizes,
        out,
        rows,
        inputs,
        share,
        SEGMENTS=len(projections),
        R_BLOCK=_rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        EVEN=inputs % tiles.bk == 0,
        FULL_RANK=all(projection.rank == _rank_block(rank) for projection in projections),
        PRECISION=_precision(x),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    return out


def gated(x: Tensor, gate: Projection, up: Projection, tiles: Tiles | None = None) -> Tensor:
    """Rows `[B, K]` to `silu(gate(x)) * up(x)`, `[B, N]`."""
    rows, inputs = x.shape
    outputs = gate.weight.shape[0]
    rank = max(gate.rank, up.rank)
    tiles = tiles or gate_tiles(rows)
    stages = _stages(tiles, x, gate.weight, 2, 2 * _rank_block(rank))
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _gate[(triton.cdiv(outputs, tiles.bn), triton.cdiv(rows, tiles.bm))](
        x,
        gate.weight,
        up.weight,
        *_adapters([gate.down, up.down], x),
        *_adapters([gate.up, up.up], x),
        gate.scaling,
        up.scaling,
        gate.rank,
        up.rank,
        out,
        rows,
        outputs,
        inputs,
        R_BLOCK=_rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        EVEN=inputs % tiles.bk == 0,
        PRECISION=_precision(x),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    return out


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
        _or(parts, hidden),
        _or(bias, hidden),
        weight,
        normed,
        rows,
        N=width,
        N_BLOCK=triton.next_power_of_2(width),
        PARTS=0 if parts is None else parts.shape[0],
        BIAS=bias is not None,
        EPSILON=epsilon,
        num_warps=8,
    )
    return normed


def place(
    parts: Tensor,
    biases: Sequence[Tensor | None],
    norms: Sequence[Tensor | None],
    epsilon: float,
    rotation: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
) -> Tensor:
    """Parts `[P, B, (Hq + 2 H) D]` of queries, keys and values to rotated queries `[B, Hq, D]`.

    Keys and values go to the pool `[S, H, D]` at `slots` `[B]`. `biases` has three entries, `norms`
    two; `rotation` is cosines and sines `[B, D]`.
    """
    rows, heads, width = parts.shape[1], keys.shape[1], keys.shape[2]
    query = torch.empty(rows, query_heads, width, dtype=keys.dtype, device=keys.device)
    cos, sin = rotation if rotation is not None else (query, query)
    _place[(rows, query_heads + 2 * heads)](
        parts,
        *[_or(bias, query) for bias in biases],
        *[_or(norm, query) for norm in norms],
        cos,
        sin,
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
        num_warps=1,
    )
    return query


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is never read stands in for a tensor that is not there."""
    return other if tensor is None else tensor


def _adapters(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """The same, with stand-ins of the same type as the tensors that are there."""
    known = next((tensor for tensor in tensors if tensor is not None), other)
    return [_or(tensor, known) for tensor in tensors]


def _stages(tiles: Tiles, x: Tensor, weight: Tensor, weights: int, ranks: int) -> int:
    """As many blocks in flight as asked for, or as fit a Hopper processor's shared memory."""
    each = tiles.bm * x.itemsize + (weights * tiles.bn + ranks) * weight.itemsize
    return max(1, min(tiles.stages, SHARED_MEMORY // (each * tiles.bk)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
