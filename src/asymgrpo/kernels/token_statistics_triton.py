"""Triton kernels for a tile of logits; `token_statistics_tiles` holds their definitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from asymgrpo.kernels.token_statistics import Head, _Running

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _capped(raw, logit_scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    value = raw.to(tl.float32) * logit_scale
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        value = cap * (2 * tl.sigmoid(2 * value / cap) - 1)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    tile_ptr,
    factors_ptr,
    targets_ptr,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    target_ptr,
    rescale_ptr,
    width,
    tile_stride,
    factors_stride,
    logit_scale,
    cap,
    inverse_temperature,
    HAS_CAP: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program a token. The first pass finds the row's maximum, the second sums relative to it;
    # the row is still in the cache for the second.
    row = tl.program_id(0).to(tl.int64)
    tile_row = tile_ptr + row * tile_stride
    factors_row = factors_ptr + row * factors_stride
    local_target = tl.load(targets_ptr + row)
    old_maximum = tl.load(maximum_ptr + row)
    lanes = tl.arange(0, BLOCK)

    highest = tl.full((BLOCK,), -1e30, tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + lanes
        raw = tl.load(tile_row + columns, mask=columns < width, other=0.0)
        z = _capped(raw, logit_scale, cap, HAS_CAP) * inverse_temperature
        highest = tl.maximum(highest, tl.where(columns < width, z, -1e30))
    maximum = tl.maximum(old_maximum, tl.max(highest, axis=0))

    totals = tl.zeros((BLOCK,), tl.float32)
    weighteds = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + lanes
        inside = columns < width
        raw = tl.load(tile_row + columns, mask=inside, other=0.0)
        capped = _capped(raw, logit_scale, cap, HAS_CAP)
        z = tl.where(inside, capped * inverse_temperature - maximum, 0.0)
        exponential = tl.where(inside, tl.exp(z), 0.0)
        totals += exponential
        weighteds += exponential * z
        if WRITE:
            factor = tl.where(columns == local_target, 0.0, exponential)
            if HAS_CAP:
                factor *= 1 - (capped / cap) * (capped / cap)
            tl.store(factors_row + columns, factor.to(factors_ptr.dtype.element_ty), mask=inside)

    shift = old_maximum - maximum
    rescale = tl.exp(shift)
    old_total = tl.load(total_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)
    tl.store(weighted_ptr + row, (old_weighted + old_total * shift) * rescale + tl.sum(weighteds))
    tl.store(total_ptr + row, old_total * rescale + tl.sum(totals))
    tl.store(maximum_ptr + row, maximum)
    tl.store(rescale_ptr + row, rescale)
    if (local_target >= 0) & (local_target < width):
        raw = tl.load(tile_row + local_target)
        z = _capped(raw, logit_scale, cap, HAS_CAP) * inverse_temperature
        tl.store(target_ptr + row, z)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    tile_ptr,
    result_ptr,
    targets_ptr,
    normalisers_ptr,
    entropies_ptr,
    grad_logps_ptr,
    grad_entropies_ptr,
    width,
    tile_stride,
    result_stride,
    logit_scale,
    cap,
    inverse_temperature,
    HAS_CAP: tl.constexpr,
    HAS_LOGPS: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    raw = tl.load(tile_ptr + row * tile_stride + columns, mask=inside, other=0.0)
    capped = _capped(raw, logit_scale, cap, HAS_CAP)
    log_p = capped * inverse_temperature - tl.load(normalisers_ptr + row)
    p = tl.exp(log_p)
    result = tl.zeros((BLOCK,), tl.float32)
    if HAS_LOGPS:
        hit = tl.where(columns == tl.load(targets_ptr + row), 1.0, 0.0)
        result += tl.load(grad_logps_ptr + row) * (hit - p)
    if HAS_ENTROPIES:
        entropy = tl.load(entropies_ptr + row)
        result -= tl.load(grad_entropies_ptr + row) * p * (log_p + entropy)
    if HAS_CAP:
        result *= 1 - (capped / cap) * (capped / cap)
    result *= logit_scale * inverse_temperature
    result = result.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + row * result_stride + columns, result, mask=inside)


def fold_tile(
    tile: Tensor, local_targets: Tensor, state: _Running, head: Head, factors: torch.dtype | None
) -> Tensor | None:
    """Fold `tile` [n, words] into `state`; the tensor of factors where `factors` is a dtype."""
    written = None if factors is None else torch.empty_like(tile, dtype=factors)
    out = tile if written is None else written
    _fold_kernel[(len(tile),)](
        tile,
        out,
        local_targets,
        state.maximum,
        state.total,
        state.weighted,
        state.target,
        state.rescale,
        tile.shape[1],
        tile.stride(0),
        out.stride(0),
        float(head.logit_scale),
        float(head.soft_cap or 1.0),
        1.0 / head.temperature,
        HAS_CAP=head.soft_cap is not None,
        WRITE=written is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return written


def gradient_tile(
    tile: Tensor,
    local_targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    grad_logps: Tensor | None,
    grad_entropies: Tensor | None,
    head: Head,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient with respect to the raw logits of `tile` [n, words], in `dtype`."""
    result = torch.empty_like(tile, dtype=dtype)
    _gradient_kernel[(len(tile), triton.cdiv(tile.shape[1], _BLOCK))](
        tile,
        result,
        local_targets,
        normalisers,
        entropies,
        normalisers if grad_logps is None else grad_logps.contiguous(),
        normalisers if grad_entropies is None else grad_entropies.contiguous(),
        tile.shape[1],
        tile.stride(0),
        result.stride(0),
        float(head.logit_scale),
        float(head.soft_cap or 1.0),
        1.0 / head.temperature,
        HAS_CAP=head.soft_cap is not None,
        HAS_LOGPS=grad_logps is not None,
        HAS_ENTROPIES=grad_entropies is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return result
