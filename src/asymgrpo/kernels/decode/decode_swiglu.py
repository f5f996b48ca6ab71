"""A decoding step's gated activation, `silu(gate(x)) * up(x)`, with both low-rank adapters.

It has so many programs that `x A^T` in each costs up to half as much as the weights; two more
programs do it, and the others wait for them shortly before they end. From Hopper on the weights
come by the hardware's bulk copies. Products are of weights with transposed inputs: weights fill the
matrix units however few rows of inputs there are.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank; weights are `[N, K]`.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .chaining import ask_for, call_next, follow, launch
from .decode_projection import (
    Projection,
    Tiles,
    adapters,
    precision,
    rank_block,
    row_block,
    stages_that_fit,
)
from .hardware import is_hopper


@triton.jit
def _x_block(x, first_row, rows, k, M, K, BK: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):
    """Rows `[BM, BK]` of the input, by a bulk copy where there is one; zeros past the end."""
    if BULK:
        return x.load([first_row, k])
    else:
        at = k + tl.arange(0, BK)
        inside = (rows < M)[:, None] & ((at < K)[None, :] | EVEN)
        return tl.load(x + rows[:, None] * K + at[None, :], mask=inside, other=0.0)


@triton.jit
def _low(
    x,
    down,
    rank,
    low,
    ready,
    first_row,
    M,
    K,
    row_ranks,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """An adapter's `x A^T` for a strip of rows, and the sign that it is there."""
    rows = first_row + tl.arange(0, BM)
    ranks = tl.arange(0, R_BLOCK)
    sums = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        xk = _x_block(x, first_row, rows, k, M, K, BK, EVEN, BULK)
        inside = (ranks < rank)[:, None] & ((at < K)[None, :] | EVEN)
        ak = tl.load(down + ranks[:, None] * K + at[None, :], mask=inside, other=0.0)
        sums = tl.dot(xk, tl.trans(ak.to(DTYPE)), sums, input_precision=PRECISION)
    to = low + rows[:, None] * row_ranks + ranks[None, :]
    tl.store(to, sums.to(DTYPE), mask=(rows < M)[:, None] & (ranks < rank)[None, :])
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")


@triton.jit
def _lows(lows, ready, rows, ranks, rank_gate, rank_up, M):
    """Both adapters' `x A^T` of a strip of rows, once they are there.

    Read past the first-level cache, which knows nothing of what other processors wrote.
    """
    while tl.atomic_add(ready, 0, sem="acquire") < 2:
        pass
    there = (rows < M)[:, None]
    at = lows + rows[:, None] * (rank_gate + rank_up) + ranks[None, :]
    in_gate, in_up = (ranks < rank_gate)[None, :], (ranks < rank_up)[None, :]
    low_gate = tl.load(at, mask=there & in_gate, other=0.0, cache_modifier=".cg")
    low_up = tl.load(at + rank_gate, mask=there & in_up, other=0.0, cache_modifier=".cg")
    return low_gate, low_up


@triton.jit
def _activate(
    x,
    gate, up,
    gate_at, up_at,
    up_gate, up_up,
    scale_gate, scale_up,
    rank_gate, rank_up,
    lows,
    ready,
    out,
    first_row, first,
    M, N, K,
    ADAPTED: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ASK_AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A block of the result.

    `gate` and `up` describe the weights to bulk copies, `gate_at` and `up_at` are where they lie.
    """
    rows = first_row + tl.arange(0, BM)
    columns = first + tl.arange(0, BN)
    ranks = tl.arange(0, R_BLOCK)
    held = tl.minimum(columns, N - 1)
    DTYPE: tl.constexpr = out.dtype.element_ty
    in_gate, in_up = (ranks < rank_gate)[None, :], (ranks < rank_up)[None, :]
    from_gate = up_gate + held[:, None] * rank_gate + ranks[None, :]
    from_up = up_up + held[:, None] * rank_up + ranks[None, :]
    # Adapters are read ahead where registers can hold them for so long.
    AHEAD: tl.constexpr = ADAPTED and R_BLOCK <= 16
    LOWS_AHEAD: tl.constexpr = AHEAD and R_BLOCK * BM <= 2048
    if AHEAD:
        bg = tl.load(from_gate, mask=in_gate, other=0.0).to(DTYPE)
        bu = tl.load(from_up, mask=in_up, other=0.0).to(DTYPE)
    if LOWS_AHEAD:
        low_gate = tl.zeros((BM, R_BLOCK), DTYPE)
        low_up = tl.zeros((BM, R_BLOCK), DTYPE)
    SIZE: tl.constexpr = gate_at.dtype.element_ty.primitive_bitwidth // 8
    both = tl.arange(0, 2 * BN)
    asked = tl.where(both < BN, gate_at.to(tl.int64), up_at.to(tl.int64))
    asked += tl.minimum(first + both % BN, N - 1).to(tl.int64) * K * SIZE
    ask_for(asked, CHAINED)
    follow(CHAINED)
    gates = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    shortly_before_the_end = tl.maximum(tl.cdiv(K, BK) - 2, 0) * BK
    for k in range(0, K, BK):
        if ASK_AHEAD > 0:
            ask_for(asked + tl.minimum(k + ASK_AHEAD * BK, K - 1) * SIZE, CHAINED)
        if LOWS_AHEAD:  # noqa: SIM102 (known when compiling, unlike the next)
            if k == shortly_before_the_end:
                low_gate, low_up = _lows(lows, ready, rows, ranks, rank_gate, rank_up, M)
        xk = _x_block(x, first_row, rows, k, M, K, BK, EVEN, BULK)
        if BULK:
            gk = gate.load([first, k])
            uk = up.load([first, k])
        else:
            at = k + tl.arange(0, BK)
            inside = (at < K)[None, :] | EVEN
            gk = tl.load(gate_at + held[:, None] * K + at[None, :], mask=inside, other=0.0)
            uk = tl.load(up_at + held[:, None] * K + at[None, :], mask=inside, other=0.0)
        gates = tl.dot(gk.to(DTYPE), tl.trans(xk), gates, input_precision=PRECISION)
        ups = tl.dot(uk.to(DTYPE), tl.trans(xk), ups, input_precision=PRECISION)
    call_next(CHAINED)
    if ADAPTED:
        if not LOWS_AHEAD:
            low_gate, low_up = _lows(lows, ready, rows, ranks, rank_gate, rank_up, M)
        if not AHEAD:
            bg = tl.load(from_gate, mask=in_gate, other=0.0).to(DTYPE)
            bu = tl.load(from_up, mask=in_up, other=0.0).to(DTYPE)
        gates += tl.dot(bg, tl.trans(low_gate), input_precision=PRECISION) * scale_gate
        ups += tl.dot(bu, tl.trans(low_up), input_precision=PRECISION) * scale_up
    # Rounded where the modules round: after each projection and after the activation.
    gates = gates.to(DTYPE).to(tl.float32)
    active = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    result = tl.trans((active * ups.to(DTYPE).to(tl.float32)).to(DTYPE))
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["rank_gate", "rank_up"])
def _gate(
    x,
    gate, up,
    gate_at, up_at,
    down_gate, down_up,
    up_gate, up_up,
    scale_gate, scale_up,
    rank_gate, rank_up,
    lows,
    ready,
    out,
    M, N, K,
    ADAPTED: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ASK_AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    tile, strip = tl.program_id(0), tl.program_id(1)
    first_row = strip * BM
    DTYPE: tl.constexpr = out.dtype.element_ty
    if ADAPTED:
        # These two come first, so that they run whatever room there is: the others wait for them.
        if tile < 2:
            follow(CHAINED)
            down, rank, low = down_gate, rank_gate, lows
            if tile == 1:
                down, rank, low = down_up, rank_up, lows + rank_gate
            _low(
                x, down, rank, low, ready + strip, first_row, M, K, rank_gate + rank_up,
                R_BLOCK, BM, BK, EVEN, BULK, PRECISION, DTYPE,
            )  # fmt: skip
            call_next(CHAINED)
            return
        tile -= 2
    _activate(
        x, gate, up, gate_at, up_at, up_gate, up_up, scale_gate, scale_up, rank_gate, rank_up,
        lows, ready + strip, out, first_row, tile * BN, M, N, K,
        ADAPTED, R_BLOCK, BM, BN, BK, ASK_AHEAD, EVEN, BULK, PRECISION, CHAINED,
    )  # fmt: skip


def gate_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """Blocks for the gated activation, by what was fastest on an H200.

    >>> gate_tiles(128, torch.bfloat16).stages, gate_tiles(16, torch.float32).bn
    (3, 32)
    """
    bm = row_block(rows)
    if dtype == torch.float32:
        return Tiles(bm, 32 if bm < 64 else 64, 64, 1, 4, 4)
    # Three stages of 128 rows: two programs then fit a processor's shared memory, and all run.
    return Tiles(bm, 64, 64, 1, 4, {128: 3, 64: 4}.get(bm, 5))


def strips_of(rows: int) -> int:
    """Strips of rows that `gated` works by."""
    return int(triton.cdiv(rows, row_block(rows)))


def gains_ahead(rows: int) -> bool:
    """Whether weights that are in the cache before it starts help `gated`.

    They do where blocks are so large that few of them are on their way at a time.

    >>> [gains_ahead(rows) for rows in (64, 65, 128, 129)]
    [False, True, True, False]
    """
    return row_block(rows) == 128 and strips_of(rows) == 1


def gated(
    x: Tensor,
    gate: Projection,
    up: Projection,
    ready: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows `[B, K]` to `silu(gate(x)) * up(x)`, `[B, N]`.

    `ready` is zeros, int32, one for each of `strips_of` the rows; the call uses them up.
    """
    rows, inputs = x.shape
    outputs = gate.weight.shape[0]
    rank = max(gate.rank, up.rank)
    tiles = tiles or gate_tiles(rows, x.dtype)
    strips = triton.cdiv(rows, tiles.bm)
    stages = stages_that_fit(tiles, x, gate.weight, 2, 0)
    bulk = _bulk(x, gate.weight, up.weight)
    streamed: list[Any] = [_with_spare_rows(x, tiles.bm), gate.weight, up.weight]
    if bulk:
        shapes = [(tiles.bm, tiles.bk), (tiles.bn, tiles.bk), (tiles.bn, tiles.bk)]
        pairs = zip(streamed, shapes, strict=True)
        streamed = [TensorDescriptor.from_tensor(tensor, list(shape)) for tensor, shape in pairs]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    lows = torch.empty(rows, gate.rank + up.rank, dtype=x.dtype, device=x.device) if rank else x
    if ready is None:
        ready = torch.zeros(strips, dtype=torch.int32, device=x.device)
    launch(
        _gate,
        (triton.cdiv(outputs, tiles.bn) + (2 if rank else 0), strips),
        x.device,
        *streamed,
        gate.weight,
        up.weight,
        *adapters([gate.down, up.down], x),
        *adapters([gate.up, up.up], x),
        gate.scaling,
        up.scaling,
        gate.rank,
        up.rank,
        lows,
        ready,
        out,
        rows,
        outputs,
        inputs,
        ADAPTED=rank > 0,
        R_BLOCK=rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        # With 128 rows the shared memory holds too few blocks to hide the way from memory.
        ASK_AHEAD=stages if tiles.bm == 128 else 0,
        EVEN=inputs % tiles.bk == 0,
        BULK=bulk,
        PRECISION=precision(x),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    return out


def _bulk(*tensors: Tensor) -> bool:
    """Whether the hardware's bulk copies (Hopper and later) can stream these matrices."""
    return is_hopper(tensors[0].device) and all(
        t.dtype == tensors[0].dtype
        and t.itemsize == 2
        and t.stride(1) == 1
        and t.stride(0) * t.itemsize % 16 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def rows_with_spare(rows: int, width: int, like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Uninitialised rows `[rows, width]` with room behind them for the smallest bulk copy."""
    return torch.empty(max(rows, 64), width, dtype=dtype or like.dtype, device=like.device)[:rows]


def _with_spare_rows(x: Tensor, rows: int) -> Tensor:
    """At least so many rows, where `x` has room behind it.

    Bulk copies are slower where a block hangs over the end; no result depends on other rows.
    """
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    fits = len(x) < rows and room >= rows * x.stride(0)
    return x.as_strided((rows, x.shape[1]), x.stride()) if fits else x
