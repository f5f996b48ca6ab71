"""A decoding step's linear projections with their LoRA adapters, in one pass over the weights.

With few rows, a step is bound by reading the weights and by the number of launches. A projection
streams its weights once, accumulates the adapter's `x A^T` in the same loop and applies `B` at the
end, so an adapter costs no launch, no copy and no merge. The reduction over `K` is split over
blocks (split-K), and the kernel that follows anyway sums the partial results.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank; weights are `[N, K]`.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import shared_memory, sm_count
from .pdl import launch, launch_dependents, prefetch_l2, wait

RESERVED_SHARED_MEMORY = 12_000
"""Bytes of a block's shared memory that are not available to pipeline stages."""
MOST_RANK = 128
"""The highest LoRA rank that the kernels support."""


@dataclass(frozen=True)
class Projection:
    """A linear layer's own tensors, with those of its LoRA adapter if it has one."""

    weight: Tensor
    """`[N, K]`."""
    bias: Tensor | None = None
    down: Tensor | None = None
    """LoRA `A`, `[R, K]`."""
    up: Tensor | None = None
    """LoRA `B`, `[N, R]`."""
    scaling: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]


@triton.jit
def _prefetch_rows(
    number,
    next0,
    next1,
    rows,
    width,
    SIZE: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prefetches 128 lines, of the first `LINES` of each row, from two matrices in turn."""
    first_row = number // 2 * (128 // LINES)
    if first_row < rows:
        lane = tl.arange(0, 128)
        matrix = tl.where(number % 2 == 0, next0.to(tl.int64), next1.to(tl.int64))
        line = (first_row + lane // LINES).to(tl.int64) * width * SIZE + lane % LINES * 128
        prefetch_l2(matrix + tl.minimum(line, rows.to(tl.int64) * width * SIZE - 1), PDL)


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
    next0, next1,
    next_rows, next_width,
    M,
    K,
    share,
    LINES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    FULL_ROWS: tl.constexpr,
    FULL_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
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
    # the end are masked: there may be many, and every block would load the same few bytes for them.
    held = tl.minimum(columns, n - 1)
    begin = split * share
    end = tl.minimum(begin + share, K)
    if R_BLOCK > 1:
        tile_up = tl.load(
            up + held[:, None] * rank + ranks[None, :], mask=(ranks < rank)[None, :], other=0.0
        )
    # The first two tiles of the weights.
    prefetched = tl.arange(0, 2 * BN)
    prefetched_row = tl.minimum(tile * BN + prefetched // 2, n - 1)
    prefetch_l2(w + prefetched_row * K + tl.minimum(begin + prefetched % 2 * BK, K - 1), PDL)
    launch_dependents(PDL)
    wait(PDL)
    sums = tl.zeros((BM, BN), tl.float32)
    lora_x = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(begin, end, BK):
        if LINES > 0:
            blocks = tl.num_programs(0) * tl.num_programs(1)
            number = (k - begin) // BK * blocks + split * tl.num_programs(0) + tl.program_id(0)
            SIZE: tl.constexpr = next0.dtype.element_ty.primitive_bitwidth // 8
            _prefetch_rows(number, next0, next1, next_rows, next_width, SIZE, LINES, PDL)
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
            lora_x = tl.dot(xk, tl.trans(ak.to(xk.dtype)), lora_x, input_precision=PRECISION)
    if R_BLOCK > 1:
        narrow = lora_x.to(x.dtype.element_ty)
        grown = tl.trans(tile_up.to(x.dtype.element_ty))
        sums += tl.dot(narrow, grown, input_precision=PRECISION) * scale
    where = (split * M + rows[:, None]) * total + first + columns[None, :]
    tl.store(out + where, sums, mask=(rows < M)[:, None] & (columns < n)[None, :])


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, split-K parts, warps and pipeline stages of a projection."""

    bm: int
    bn: int
    bk: int
    splits: int
    warps: int
    stages: int


def tiles_for(rows: int, outputs: int, inputs: int, dtype: torch.dtype, sms: int) -> Tiles:
    """Tiles for a projection: enough blocks to fill `sms` multiprocessors, none without work.

    >>> tiles_for(128, 1536, 8960, torch.bfloat16, sms=132).splits
    11
    """
    # Hopper's warp-group matrix instructions take 64 rows of 16-bit values or more.
    bm = row_block(rows, 16 if dtype == torch.float32 else 64)
    bn, bk = (128 if rows > 128 else 64), 64
    tiles = -(-outputs // bn) * -(-rows // bm)
    splits = max(1, min(2 * sms // tiles, inputs // (6 * bk)))
    # With four stages, two blocks of 128 rows fit an SM's shared memory.
    stages = 4 if bm == 128 and tiles * splits > sms else 5
    return Tiles(bm, bn, bk, splits, 8 if rows > 128 else 4, stages)


def row_block(rows: int, least: int = 16) -> int:
    """Rows of a tile: a power of two between `least` and 128."""
    return min(128, max(least, int(triton.next_power_of_2(rows))))


def rank_block(rank: int) -> int:
    """The rank padded to what tensor cores take; 1 without an adapter."""
    return max(16, int(triton.next_power_of_2(rank))) if rank else 1


PREFETCHED_LINES = 8
"""128-byte lines of each row that `project` prefetches."""


def project(
    x: Tensor,
    projections: Sequence[Projection],
    tiles: Tiles | None = None,
    prefetch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Rows `[B, K]` through one to three projections, to partial sums `[P, B, N0 + N1 + N2]`.

    Their sum over `P`, in float32 and without biases, is the result. A small projection leaves
    memory bandwidth to prefetch the first columns of two matrices `[L, W]` that a later kernel
    needs.
    """
    if not 1 <= len(projections) <= 3:
        raise ValueError(f"one to three projections, not {len(projections)}")
    rows, inputs = x.shape
    outputs = [projection.weight.shape[0] for projection in projections]
    tiles = tiles or tiles_for(rows, sum(outputs), inputs, x.dtype, sm_count(x.device))
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
        *(prefetch or (x, x)),
        *(prefetch or (x, x))[0].shape,
        rows,
        inputs,
        share,
        LINES=PREFETCHED_LINES if prefetch else 0,
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
    """`other` in place of an absent tensor: a valid pointer that the kernel never reads."""
    return other if tensor is None else tensor


def adapters(tensors: Sequence[Tensor | None], other: Tensor) -> list[Tensor]:
    """LoRA matrices, absent ones replaced by one of the same dtype, so that kernels are reused."""
    known = next((tensor for tensor in tensors if tensor is not None), other)
    return [stand_in(tensor, known) for tensor in tensors]


def stages_that_fit(tiles: Tiles, x: Tensor, weight: Tensor, weights: int, ranks: int) -> int:
    """Pipeline stages: those of `tiles`, or as many as fit the shared memory."""
    each = tiles.bm * x.itemsize + (weights * tiles.bn + ranks) * weight.itemsize
    return max(
        1,
        min(tiles.stages, (shared_memory(x.device) - RESERVED_SHARED_MEMORY) // (each * tiles.bk)),
    )


def precision(x: Tensor) -> str:
    """The `input_precision` of dot products: no TF32 for float32 inputs."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
