"""A decoding step's projections with their low-rank adapters, in one pass over the weights.

With few rows a step is bound by reading the weights and by the number of launches. A projection
streams its weights once, works out the adapter's `x A^T` in the same loop, and adds `B` at the end:
no launch, no copy and no merge for an adapter. The reduction over `K` is split over programs, and
the parts are summed by the kernel that comes next anyway. The gated activation has so many programs
that `x A^T` in each costs up to half as much as the weights; there two more programs do it, and the
others wait for them before they end.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank; weights are `[N, K]`.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .chaining import call_next, chained, divided_alike, follow
from .hardware import is_hopper, shared_memory

SPARE_MEMORY = 12_000
"""Bytes of a program's shared memory that are not for blocks in flight."""
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
    FULL_ROWS: tl.constexpr,
    FULL_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
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
    # Columns past the end repeat the last one, so that the loop needs no mask for them. Rows past
    # the end are masked: there may be many, and all programs would ask for the same few bytes.
    held = tl.minimum(columns, n - 1)
    begin = split * share
    end = tl.minimum(begin + share, K)
    if R_BLOCK > 1:
        tile_up = tl.load(
            up + held[:, None] * rank + ranks[None, :], mask=(ranks < rank)[None, :], other=0.0
        )
    follow(CHAINED)
    sums = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(begin, end, BK):
        at = k + inner
        where_x = x + rows[:, None] * K + at[None, :]
        where_w = w + held[:, None] * K + at[None, :]
        if EVEN and FULL_ROWS:
            xk = tl.load(where_x)
        else:
            xk = tl.load(where_x, mask=(rows < M)[:, None] & (at < end)[None, :], other=0.0)
        wk = tl.load(where_w) if EVEN else tl.load(where_w, mask=(at < end)[None, :], other=0.0)
        sums = tl.dot(xk, tl.trans(wk.to(xk.dtype)), sums, input_precision=PRECISION)
        if R_BLOCK > 1:
            where_down = down + ranks[:, None] * K + at[None, :]
            if EVEN and FULL_RANK:
                ak = tl.load(where_down)
            else:
                inside_down = (ranks < rank)[:, None] & (at < end)[None, :]
                ak = tl.load(where_down, mask=inside_down, other=0.0)
            low = tl.dot(xk, tl.trans(ak.to(xk.dtype)), low, input_precision=PRECISION)
    call_next(CHAINED)
    if R_BLOCK > 1:
        narrow = low.to(x.dtype.element_ty)
        grown = tl.trans(tile_up.to(x.dtype.element_ty))
        sums += tl.dot(narrow, grown, input_precision=PRECISION) * scale
    where = (split * M + rows[:, None]) * total + first + columns[None, :]
    tl.store(out + where, sums, mask=(rows < M)[:, None] & (columns < n)[None, :])


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
def _activate(
    x,
    gate, up,
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
    EVEN: tl.constexpr,
    BULK: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A block of the result."""
    rows = first_row + tl.arange(0, BM)
    columns = first + tl.arange(0, BN)
    ranks = tl.arange(0, R_BLOCK)
    held = tl.minimum(columns, N - 1)
    there = (rows < M)[:, None]
    DTYPE: tl.constexpr = out.dtype.element_ty
    in_gate, in_up = (ranks < rank_gate)[None, :], (ranks < rank_up)[None, :]
    at_gate = up_gate + held[:, None] * rank_gate + ranks[None, :]
    at_up = up_up + held[:, None] * rank_up + ranks[None, :]
    # Read ahead where registers can hold them for so long.
    AHEAD: tl.constexpr = ADAPTED and R_BLOCK <= 32
    if AHEAD:
        bg = tl.load(at_gate, mask=in_gate, other=0.0).to(DTYPE)
        bu = tl.load(at_up, mask=in_up, other=0.0).to(DTYPE)
    follow(CHAINED)
    gates = tl.zeros((BM, BN), tl.float32)
    ups = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        xk = _x_block(x, first_row, rows, k, M, K, BK, EVEN, BULK)
        if BULK:
            gk = gate.load([first, k])
            uk = up.load([first, k])
        else:
            at = k + tl.arange(0, BK)
            inside = (at < K)[None, :] | EVEN
            gk = tl.load(gate + held[:, None] * K + at[None, :], mask=inside, other=0.0)
            uk = tl.load(up + held[:, None] * K + at[None, :], mask=inside, other=0.0)
        gates = tl.dot(xk, tl.trans(gk.to(DTYPE)), gates, input_precision=PRECISION)
        ups = tl.dot(xk, tl.trans(uk.to(DTYPE)), ups, input_precision=PRECISION)
    call_next(CHAINED)
    if ADAPTED:
        while tl.atomic_add(ready, 0, sem="acquire") < 2:
            pass
        if not AHEAD:
            bg = tl.load(at_gate, mask=in_gate, other=0.0).to(DTYPE)
            bu = tl.load(at_up, mask=in_up, other=0.0).to(DTYPE)
        # Past the first-level cache, which knows nothing of what other processors wrote.
        at_low = lows + rows[:, None] * (rank_gate + rank_up) + ranks[None, :]
        low_gate = tl.load(at_low, mask=there & in_gate, other=0.0, cache_modifier=".cg")
        at_low += rank_gate
        low_up = tl.load(at_low, mask=there & in_up, other=0.0, cache_modifier=".cg")
        gates += tl.dot(low_gate, tl.trans(bg), input_precision=PRECISION) * scale_gate
        ups += tl.dot(low_up, tl.trans(bu), input_precision=PRECISION) * scale_up
    # Rounded where the modules round: after each projection and after the activation.
    gates = gates.to(DTYPE).to(tl.float32)
    active = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    result = active * ups.to(DTYPE).to(tl.float32)
    mask = there & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], result.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["rank_gate", "rank_up"])
def _gate(
    x,
    gate, up,
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
        else:
            _activate(
                x, gate, up, up_gate, up_up, scale_gate, scale_up, rank_gate, rank_up, lows,
                ready + strip, out, first_row, (tile - 2) * BN, M, N, K,
                ADAPTED, R_BLOCK, BM, BN, BK, EVEN, BULK, PRECISION, CHAINED,
            )  # fmt: skip
    else:
        _activate(
            x, gate, up, up_gate, up_up, scale_gate, scale_up, rank_gate, rank_up, lows,
            ready, out, first_row, tile * BN, M, N, K,
            ADAPTED, R_BLOCK, BM, BN, BK, EVEN, BULK, PRECISION, CHAINED,
        )  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a projection."""

    bm: int
    bn: int
    bk: int
    splits: int
    warps: int
    stages: int


def tiles_for(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, processors: int = 132
) -> Tiles:
    """Blocks for a projection: parts enough to fill the device, none without work.

    >>> tiles_for(128, 1536, 8960, torch.bfloat16).splits > 1
    True
    """
    bm = _row_block(rows, dtype)
    bn, bk = (128 if rows > 128 else 64), 64
    tiles = -(-outputs // bn) * -(-rows // bm)
    splits = max(1, min(2 * processors // tiles, inputs // (6 * bk)))
    return Tiles(bm, bn, bk, splits, 8 if rows > 128 else 4, 4 if bm == 128 else 5)


def gate_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """Blocks for the gated activation, by what was fastest on an H200.

    >>> gate_tiles(128, torch.bfloat16).stages, gate_tiles(16, torch.float32).bn
    (3, 32)
    """
    bm = _row_block(rows, dtype)
    if bm < 64:
        return Tiles(bm, 32, 64, 1, 4, 4)
    # Three stages of 128 rows: two programs then fit a processor's shared memory, and all run.
    return Tiles(bm, 64, 64, 1, 4, 3 if bm == 128 else 4)


def _row_block(rows: int, dtype: torch.dtype) -> int:
    """Rows of a block; the fast matrix instructions of Hopper take 64 of half precision or more."""
    least = 16 if dtype == torch.float32 else 64
    return min(128, max(least, int(triton.next_power_of_2(rows))))


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
    tiles = tiles or tiles_for(rows, sum(outputs), inputs, x.dtype)
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
    compiled = _project[grid](
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
        FULL_ROWS=rows % tiles.bm == 0,
        FULL_RANK=all(projection.rank == _rank_block(rank) for projection in projections),
        PRECISION=_precision(x),
        **chained(x.device),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    divided_alike(compiled)
    return out


def strips_of(rows: int, dtype: torch.dtype) -> int:
    """Strips of rows that `gated` works by."""
    return int(triton.cdiv(rows, _row_block(rows, dtype)))


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
    stages = _stages(tiles, x, gate.weight, 2, 0)
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
    compiled = _gate[(triton.cdiv(outputs, tiles.bn) + (2 if rank else 0), strips)](
        *streamed,
        *_adapters([gate.down, up.down], x),
        *_adapters([gate.up, up.up], x),
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
        R_BLOCK=_rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        EVEN=inputs % tiles.bk == 0,
        BULK=bulk,
        PRECISION=_precision(x),
        **chained(x.device),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    divided_alike(compiled)
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
    """Uninitialised rows `[rows, width]` with room behind them for a block of `gated`."""
    return torch.empty(max(rows, 64), width, dtype=dtype or like.dtype, device=like.device)[:rows]


def _with_spare_rows(x: Tensor, rows: int) -> Tensor:
    """At least so many rows, where `x` has room behind it.

    Bulk copies are slower where a block hangs over the end; no result depends on other rows.
    """
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    fits = len(x) < rows and room >= rows * x.stride(0)
    return x.as_strided((rows, x.shape[1]), x.stride()) if fits else x


def stand_in(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is never read stands in for a tensor that is not there."""
    return other if tensor is None else tensor


def _adapters(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """The same, with stand-ins of the same type as the tensors that are there."""
    known = next((tensor for tensor in tensors if tensor is not None), other)
    return [stand_in(tensor, known) for tensor in tensors]


def _stages(tiles: Tiles, x: Tensor, weight: Tensor, weights: int, ranks: int) -> int:
    """As many blocks in flight as asked for, or as fit the shared memory."""
    each = tiles.bm * x.itemsize + (weights * tiles.bn + ranks) * weight.itemsize
    return max(1, min(tiles.stages, (shared_memory(x.device) - SPARE_MEMORY) // (each * tiles.bk)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
