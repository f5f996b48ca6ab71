"""A decoding step's SwiGLU, `silu(gate(x)) * up(x)`, with both LoRA adapters.

There are so many blocks that computing the LoRA down-projection `x A^T` in each of them would cost
up to half as much as reading the weights. Two extra blocks per strip of rows compute it instead,
and the others wait for them shortly before they finish. On Hopper and newer, weights are streamed
by TMA. Products are of weights with transposed inputs, so that the weights fill the tensor cores
however few rows of inputs there are.

Letters: `B` rows, `K` inputs, `N` outputs, `R` rank; weights are `[N, K]`.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..hardware import is_hopper
from .decode_projection import (
    Projection,
    Tiles,
    adapters,
    precision,
    rank_block,
    row_block,
    stages_that_fit,
)
from .pdl import launch, launch_dependents, prefetch_l2, wait


@triton.jit
def _x_block(x, first_row, rows, k, M, K, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):
    """A block `[BM, BK]` of the input, by TMA where it is used; zeros past the end."""
    if TMA:
        return x.load([first_row, k])
    else:
        at = k + tl.arange(0, BK)
        inside = (rows < M)[:, None] & ((at < K)[None, :] | EVEN)
        return tl.load(x + rows[:, None] * K + at[None, :], mask=inside, other=0.0)


@triton.jit
def lora_down(
    x,
    lora_a,
    rank,
    lora_x,
    ready,
    first_row,
    M,
    K,
    row_ranks,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes one adapter's `x A^T` for a strip of rows, then counts itself as ready."""
    rows = first_row + tl.arange(0, BM)
    ranks = tl.arange(0, R_BLOCK)
    sums = tl.zeros((BM, R_BLOCK), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)
        xk = _x_block(x, first_row, rows, k, M, K, BK, EVEN, TMA)
        inside = (ranks < rank)[:, None] & ((at < K)[None, :] | EVEN)
        ak = tl.load(lora_a + ranks[:, None] * K + at[None, :], mask=inside, other=0.0)
        sums = tl.dot(xk, tl.trans(ak.to(DTYPE)), sums, input_precision=PRECISION)
    to = lora_x + rows[:, None] * row_ranks + ranks[None, :]
    tl.store(to, sums.to(DTYPE), mask=(rows < M)[:, None] & (ranks < rank)[None, :])
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")


@triton.jit
def await_lora_down(lora_x, ready, rows, ranks, rank_gate, rank_up, M):
    """Spins until both adapters' `x A^T` of a strip of rows are written, then loads them.

    The loads bypass L1, which is not coherent with writes from other SMs.
    """
    while tl.atomic_add(ready, 0, sem="acquire") < 2:
        pass
    there = (rows < M)[:, None]
    at = lora_x + rows[:, None] * (rank_gate + rank_up) + ranks[None, :]
    in_gate, in_up = (ranks < rank_gate)[None, :], (ranks < rank_up)[None, :]
    gate_lora_x = tl.load(at, mask=there & in_gate, other=0.0, cache_modifier=".cg")
    up_lora_x = tl.load(at + rank_gate, mask=there & in_up, other=0.0, cache_modifier=".cg")
    return gate_lora_x, up_lora_x


@triton.jit
def _swiglu_tile(
    x,
    gate, up,
    gate_at, up_at,
    lora_b_gate, lora_b_up,
    scale_gate, scale_up,
    rank_gate, rank_up,
    lora_x,
    ready,
    out,
    first_row, first,
    M, N, K,
    LORA: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREFETCH_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the result.

    `gate` and `up` are the weights' TMA descriptors (or pointers); `gate_at` and `up_at` are
    pointers in either case.
    """
    rows = first_row + tl.arange(0, BM)
    columns = first + tl.arange(0, BN)
    ranks = tl.arange(0, R_BLOCK)
    held = tl.minimum(columns, N - 1)
    DTYPE: tl.constexpr = out.dtype.element_ty
    in_gate, in_up = (ranks < rank_gate)[None, :], (ranks < rank_up)[None, :]
    from_gate = lora_b_gate + held[:, None] * rank_gate + ranks[None, :]
    from_up = lora_b_up + held[:, None] * rank_up + ranks[None, :]
    # Adapters are loaded before the loop if the registers can hold them throughout.
    AHEAD: tl.constexpr = LORA and R_BLOCK <= 16
    DOWN_AHEAD: tl.constexpr = AHEAD and R_BLOCK * BM <= 2048
    if AHEAD:
        bg = tl.load(from_gate, mask=in_gate, other=0.0).to(DTYPE)
        bu = tl.load(from_up, mask=in_up, other=0.0).to(DTYPE)
    if DOWN_AHEAD:
        gate_lora_x = tl.zeros((BM, R_BLOCK), DTYPE)
        up_lora_x = tl.zeros((BM, R_BLOCK), DTYPE)
    SIZE: tl.constexpr = gate_at.dtype.element_ty.primitive_bitwidth // 8
    both = tl.arange(0, 2 * BN)
    prefetched = tl.where(both < BN, gate_at.to(tl.int64), up_at.to(tl.int64))
    prefetched += tl.minimum(first + both % BN, N - 1).to(tl.int64) * K * SIZE
    prefetch_l2(prefetched, PDL)
    wait(PDL)
    gates = tl.zeros((BN, BM), tl.float32)
    ups = tl.zeros((BN, BM), tl.float32)
    near_the_end = tl.maximum(tl.cdiv(K, BK) - 2, 0) * BK
    for k in range(0, K, BK):
        if PREFETCH_BLOCKS > 0:
            prefetch_l2(prefetched + tl.minimum(k + PREFETCH_BLOCKS * BK, K - 1) * SIZE, PDL)
        if DOWN_AHEAD:  # noqa: SIM102 (a constexpr, unlike the next condition)
            if k == near_the_end:
                gate_lora_x, up_lora_x = await_lora_down(
                    lora_x, ready, rows, ranks, rank_gate, rank_up, M
                )
        xk = _x_block(x, first_row, rows, k, M, K, BK, EVEN, TMA)
        if TMA:
            gk = gate.load([first, k])
            uk = up.load([first, k])
        else:
            at = k + tl.arange(0, BK)
            inside = (at < K)[None, :] | EVEN
            gk = tl.load(gate_at + held[:, None] * K + at[None, :], mask=inside, other=0.0)
            uk = tl.load(up_at + held[:, None] * K + at[None, :], mask=inside, other=0.0)
        gates = tl.dot(gk.to(DTYPE), tl.trans(xk), gates, input_precision=PRECISION)
        ups = tl.dot(uk.to(DTYPE), tl.trans(xk), ups, input_precision=PRECISION)
    launch_dependents(PDL)
    if LORA:
        if not DOWN_AHEAD:
            gate_lora_x, up_lora_x = await_lora_down(
                lora_x, ready, rows, ranks, rank_gate, rank_up, M
            )
        if not AHEAD:
            bg = tl.load(from_gate, mask=in_gate, other=0.0).to(DTYPE)
            bu = tl.load(from_up, mask=in_up, other=0.0).to(DTYPE)
        gates += tl.dot(bg, tl.trans(gate_lora_x), input_precision=PRECISION) * scale_gate
        ups += tl.dot(bu, tl.trans(up_lora_x), input_precision=PRECISION) * scale_up
    # Round where the modules round: after each projection and after the activation.
    gates = gates.to(DTYPE).to(tl.float32)
    active = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    result = tl.trans((active * ups.to(DTYPE).to(tl.float32)).to(DTYPE))
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["rank_gate", "rank_up"])
def _swiglu(
    x,
    gate, up,
    gate_at, up_at,
    lora_a_gate, lora_a_up,
    lora_b_gate, lora_b_up,
    scale_gate, scale_up,
    rank_gate, rank_up,
    lora_x,
    counters,
    out,
    M, N, K,
    LORA: tl.constexpr,
    R_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREFETCH_BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each strip of rows has two LoRA down-projections (with adapters) and the tiles of its result.

    Tiles spin on their strip's down-projections, and CUDA promises no order in which blocks start:
    if tiles could fill the GPU first, they would wait forever. So a block does not take its role
    from its index but draws a ticket when it starts, and tickets hand out the down-projections of a
    strip before its tiles. Whoever waits thus waits for blocks that have started already. Those
    depend on no other block of this kernel, and CUDA guarantees that a block that has started makes
    progress, so every wait ends.

    The ticket is drawn before `wait`, since prefetching depends on it. `swiglu` says why the
    counters are zeroed by then.
    """
    number = tl.program_id(0)
    per_strip = tl.cdiv(N, BN)
    if LORA:
        per_strip += 2
        number = tl.atomic_add(counters, 1, sem="relaxed")
    tile, strip = number % per_strip, number // per_strip
    first_row = strip * BM
    ready = counters + 1 + strip
    DTYPE: tl.constexpr = out.dtype.element_ty
    if LORA:
        if tile < 2:
            wait(PDL)
            lora_a, rank, target = lora_a_gate, rank_gate, lora_x
            if tile == 1:
                lora_a, rank, target = lora_a_up, rank_up, lora_x + rank_gate
            lora_down(
                x, lora_a, rank, target, ready, first_row, M, K, rank_gate + rank_up,
                R_BLOCK, BM, BK, EVEN, TMA, PRECISION, DTYPE,
            )  # fmt: skip
            launch_dependents(PDL)
            return
        tile -= 2
    _swiglu_tile(
        x, gate, up, gate_at, up_at, lora_b_gate, lora_b_up, scale_gate, scale_up,
        rank_gate, rank_up, lora_x, ready, out, first_row, tile * BN, M, N, K,
        LORA, R_BLOCK, BM, BN, BK, PREFETCH_BLOCKS, EVEN, TMA, PRECISION, PDL,
    )  # fmt: skip


def swiglu_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes of `swiglu`, the fastest on an H200.

    >>> swiglu_tiles(128, torch.bfloat16).stages, swiglu_tiles(16, torch.float32).bn
    (3, 32)
    """
    bm = row_block(rows)
    if dtype == torch.float32:
        return Tiles(bm, 32 if bm < 64 else 64, 64, 1, 4, 4)
    # With three stages, two blocks of 128 rows fit an SM's shared memory, and all run at once.
    return Tiles(bm, 64, 64, 1, 4, {128: 3, 64: 4}.get(bm, 5))


def swiglu_counters(rows: int) -> int:
    """Zeroed int32 counters that `swiglu` needs: a ticket, and one per strip of rows.

    >>> swiglu_counters(128), swiglu_counters(129)
    (2, 3)
    """
    return 1 + int(triton.cdiv(rows, row_block(rows)))


def prefetch_helps(rows: int) -> bool:
    """Whether `swiglu` gains from weights that are in L2 before it starts.

    It does where its blocks are so large that few loads are in flight at a time.

    >>> [prefetch_helps(rows) for rows in (64, 65, 128, 129)]
    [False, True, True, False]
    """
    return 64 < rows <= 128


def swiglu(
    x: Tensor,
    gate: Projection,
    up: Projection,
    counters: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows `[B, K]` to `silu(gate(x)) * up(x)`, `[B, N]`.

    `counters` are `swiglu_counters` zeros in int32, used up by the call. The kernel counts in them
    before it waits for the previous kernel, so an earlier one must have zeroed them: a step zeroes
    those of all layers first, and `add_rmsnorm`, which comes just before this, launches its
    dependents only after everything ahead of it has completed.
    """
    rows, inputs = x.shape
    outputs = gate.weight.shape[0]
    rank = max(gate.rank, up.rank)
    tiles = tiles or swiglu_tiles(rows, x.dtype)
    strips = triton.cdiv(rows, tiles.bm)
    stages = stages_that_fit(tiles, x, gate.weight, 2, 0)
    tma = _fits_tma(x, gate.weight, up.weight)
    streamed: list[Any] = [_with_padding_rows(x, tiles.bm), gate.weight, up.weight]
    if tma:
        shapes = [(tiles.bm, tiles.bk), (tiles.bn, tiles.bk), (tiles.bn, tiles.bk)]
        pairs = zip(streamed, shapes, strict=True)
        streamed = [TensorDescriptor.from_tensor(tensor, list(shape)) for tensor, shape in pairs]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    lora_x = torch.empty(rows, gate.rank + up.rank, dtype=x.dtype, device=x.device) if rank else x
    if counters is None:
        counters = torch.zeros(1 + strips, dtype=torch.int32, device=x.device)
        if x.is_cuda:
            # Nothing separates this fill from the kernel, which reads the counters at its start.
            torch.cuda.current_stream(x.device).synchronize()
    launch(
        _swiglu,
        ((triton.cdiv(outputs, tiles.bn) + (2 if rank else 0)) * strips,),
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
        lora_x,
        counters,
        out,
        rows,
        outputs,
        inputs,
        LORA=rank > 0,
        R_BLOCK=rank_block(rank),
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        # With 128 rows, shared memory holds too few stages to hide the latency of global memory.
        PREFETCH_BLOCKS=stages if tiles.bm == 128 else 0,
        EVEN=inputs % tiles.bk == 0,
        TMA=tma,
        PRECISION=precision(x),
        num_warps=tiles.warps,
        num_stages=stages,
    )
    return out


def _fits_tma(*tensors: Tensor) -> bool:
    """Whether TMA (Hopper and newer) can load these matrices: 16-bit types, 16-byte alignment."""
    return is_hopper(tensors[0].device) and all(
        t.dtype == tensors[0].dtype
        and t.itemsize == 2
        and t.stride(1) == 1
        and t.stride(0) * t.itemsize % 16 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def empty_padded_rows(rows: int, width: int, like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Uninitialised `[rows, width]`, with memory behind it for the smallest TMA box."""
    return torch.empty(max(rows, 64), width, dtype=dtype or like.dtype, device=like.device)[:rows]


def _with_padding_rows(x: Tensor, rows: int) -> Tensor:
    """`x` extended to at least `rows` rows, if its storage has room for them.

    TMA is slower on boxes that reach past the end of a tensor. No result depends on the extra rows.
    """
    room = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    fits = len(x) < rows and room >= rows * x.stride(0)
    return x.as_strided((rows, x.shape[1]), x.stride()) if fits else x
