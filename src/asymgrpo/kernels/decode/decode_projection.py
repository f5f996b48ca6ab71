"""A decoding step's projections with their low-rank adapters, in one pass over the weights.

With few rows a step is bound by reading the weights and by the number of launches. A projection
streams its weights once, works out the adapter's `x A^T` in the same loop, and adds `B` at the end:
no launch, no copy and no merge for an adapter. The reduction over `K` is split over programs, and
the parts are summed by the kernel that comes next anyway.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank; weights are `[N, K]`.
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

from .chaining import ask_for, call_next, follow, launch
from .hardware import PROCESSORS, shared_memory

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


@triton.jit
def _ask_for_later(
    number,
    later0,
    later1,
    rows,
    width,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Asks for 128 of the first `LINES` lines of the rows of two matrices, which take turns."""
    first_row = number // 2 * (128 // LINES)
    if first_row < rows:
        lane = tl.arange(0, 128)
        matrix = tl.where(number % 2 == 0, later0.to(tl.int64), later1.to(tl.int64))
        line = (first_row + lane // LINES).to(tl.int64) * width * SIZE + lane % LINES * 128
        ask_for(matrix + tl.minimum(line, rows.to(tl.int64) * width * SIZE - 1), CHAINED)


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
    later0, later1,
    later_rows, later_width,
    M,
    K,
    share,
    LATER_LINES: tl.constexpr,
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
    # The first two blocks of the weights.
    asked = tl.arange(0, 2 * BN)
    asked_row = tl.minimum(tile * BN + asked // 2, n - 1)
    ask_for(w + asked_row * K + tl.minimum(begin + asked % 2 * BK, K - 1), CHAINED)
    call_next(CHAINED)
    follow(CHAINED)
    sums = tl.zeros((BM, BN), tl.float32)
    low = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(begin, end, BK):
        if LATER_LINES > 0:
            programs = tl.num_programs(0) * tl.num_programs(1)
            number = (k - begin) // BK * programs + split * tl.num_programs(0) + tl.program_id(0)
            SIZE: tl.constexpr = later0.dtype.element_ty.primitive_bitwidth // 8
            _ask_for_later(
                number, later0, later1, later_rows, later_width, SIZE, LATER_LINES, CHAINED
            )
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
    if R_BLOCK > 1:
        narrow = low.to(x.dtype.element_ty)
        grown = tl.trans(tile_up.to(x.dtype.element_ty))
        sums += tl.dot(narrow, grown, input_precision=PRECISION) * scale
    where = (split * M + rows[:, None]) * total + first + columns[None, :]
    tl.store(out + where, sums, mask=(rows < M)[:, None] & (columns < n)[None, :])


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
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, processors: int = PROCESSORS
) -> Tiles:
    """Blocks for a projection: parts enough to fill the device, none without work.

    >>> tiles_for(128, 1536, 8960, torch.bfloat16).splits > 1
    True
    """
    # The fast matrix instructions of Hopper take 64 rows of half precision or more.
    bm = row_block(rows, 16 if dtype == torch.float32 else 64)
    bn, bk = (128 if rows > 128 else 64), 64
    tiles = -(-outputs // bn) * -(-rows // bm)
    splits = max(1, min(2 * processors // tiles, inputs // (6 * bk)))
    # Two programs of 128 rows fit a processor's shared memory with four stages.
    stages = 4 if bm == 128 and tiles * splits > processors else 5
    return Tiles(bm, bn, bk, splits, 8 if rows > 128 else 4, stages)


def row_block(rows: int, least: int = 16) -> int:
    """Rows of a block."""
    return min(128, max(least, int(triton.next_power_of_2(rows))))


def rank_block(rank: int) -> int:
    """Ranks as the matrix units take them; 1 where there is no adapter."""
    return max(16, int(triton.next_power_of_2(rank))) if rank else 1


LATER_LINES = 8
"""Lines of 128 bytes of each row that `project` asks for."""


def project(
    x: Tensor,
    projections: Sequence[Projection],
    tiles: Tiles | None = None,
    later: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rows `[B, K]` through one to three maps of the same input, to parts `[P, B, N0 + N1 + N2]`.

    The sum over parts, in float32 and without biases, is the result. A small projection leaves
    memory time to bring the beginnings of two matrices `[L, W]` that are needed later.
    """
    if not 1 <= len(projections) <= 3:
        raise ValueError(f"one to three projections, not {len(projections)}")
    rows, inputs = x.shape
    outputs = [projection.weight.shape[0] for projection in projections]
    tiles = tiles or tiles_for(rows, sum(outputs), inputs, x.dtype)
    rank = max(projection.rank for projection in projections)
    stages = stages_that_fit(tiles, x, projections[0].weight, 1, rank_block(rank))
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
    launch(
        _project,
        grid,
        x.device,
        x,
        *[projection.weight for projection in three],
        *adapters([projection.down for projection in three], x),
        *adapters([projection.up for projection in three], x),
        *[projection.scaling for projection in three],
        *[projection.rank for projection in three],
        *sizes,
        out,
        *(later or (x, x)),
        *(later or (x, x))[0].shape,
        rows,
        inputs,
        share,
        LATER_LINES=LATER_LINES if later else 0,
        SEGMENTS=len(projections),
        R_BLOCK=rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        EVEN=inputs % tiles.bk == 0,
        FULL_ROWS=rows % tiles.bm == 0,
        FULL_RANK=all(projection.rank == rank_block(rank) for projection in projections),
        PRECISION=precision(x),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    return out


def stand_in(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is never read stands in for a tensor that is not there."""
    return other if tensor is None else tensor


def adapters(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """The same, with stand-ins of the same type as the tensors that are there."""
    known = next((tensor for tensor in tensors if tensor is not None), other)
    return [stand_in(tensor, known) for tensor in tensors]


def stages_that_fit(tiles: Tiles, x: Tensor, weight: Tensor, weights: int, ranks: int) -> int:
    """As many blocks in flight as asked for, or as fit the shared memory."""
    each = tiles.bm * x.itemsize + (weights * tiles.bn + ranks) * weight.itemsize
    return max(1, min(tiles.stages, (shared_memory(x.device) - SPARE_MEMORY) // (each * tiles.bk)))


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
