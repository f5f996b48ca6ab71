"""Adds a projection's output to the residual stream of a decoding step, and its RMSNorm.

Letters: `B` rows, `N` width, `P` partial sums.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_projection import stand_in
from .decode_swiglu import empty_padded_rows
from .pdl import launch, launch_dependents, wait


@triton.jit
def _add_rmsnorm(
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
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, N_BLOCK)
    mask = columns < N
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    # Not before the wait: `swiglu` counts on everything ahead of this kernel being complete.
    launch_dependents(PDL)
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
    tl.store(normed + row * N + columns, (scaled * scale).to(normed.dtype.element_ty), mask=mask)


def add_rmsnorm(
    hidden: Tensor,
    parts: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Adds the sum of `parts` `[P, B, N]` to `hidden` `[B, N]` in place; returns its RMSNorm."""
    rows, width = hidden.shape
    block = triton.next_power_of_2(width)
    normed = empty_padded_rows(rows, width, hidden, dtype)
    launch(
        _add_rmsnorm,
        (rows,),
        hidden.device,
        hidden,
        stand_in(parts, hidden),
        stand_in(bias, hidden),
        weight,
        normed,
        rows,
        N=width,
        N_BLOCK=block,
        PARTS=0 if parts is None else parts.shape[0],
        BIAS=bias is not None,
        EPSILON=epsilon,
        num_warps=max(1, min(16, block // 128)),
    )
    return normed
