"""Triton kernels for a tile of logits; `logit_tiles` has their definitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .chunked_statistics import Head, _Running

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
    found_ptr,
    targets_ptr,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    target_ptr,
    first_word,
    width,
    depth,
    logit_scale,
    cap,
    inverse_temperature,
    HAS_CAP: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
):
    # One block per token, with its whole row of the tile in registers.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    local_target = tl.load(targets_ptr + row) - first_word
    old_maximum = tl.load(maximum_ptr + row)
    old_total = tl.load(total_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)

    raw = tl.load(tile_ptr + row * width + columns, mask=inside, other=0.0)
    capped = _capped(raw, logit_scale, cap, HAS_CAP)
    z = tl.where(inside, capped * inverse_temperature, -1e30)
    if (local_target >= 0) & (local_target < width):
        hit = tl.sum(tl.where(columns == local_target, z, 0.0), axis=0)
        tl.store(target_ptr + row, hit)
    maximum = tl.maximum(old_maximum, tl.max(z, axis=0))
    z = tl.where(inside, z - maximum, 0.0)
    exponential = tl.where(inside, tl.exp(z), 0.0)
    shift = old_maximum - maximum
    rescale = tl.exp(shift)
    weighted = (old_weighted + old_total * shift) * rescale + tl.sum(exponential * z, axis=0)
    tl.store(weighted_ptr + row, weighted)
    tl.store(total_ptr + row, old_total * rescale + tl.sum(exponential, axis=0))
    tl.store(maximum_ptr + row, maximum)
    if WRITE:
        factor = tl.where(columns == local_target, 0.0, exponential)
        if HAS_CAP:
            factor *= 1 - (capped / cap) * (capped / cap)
        factor = factor.to(factors_ptr.dtype.element_ty)
        tl.store(factors_ptr + row * width + columns, factor, mask=inside)
        # The maximum rarely changes after the first tiles; then there is nothing to rescale.
        if (rescale != 1.0) & (first_word > 0):
            for start in range(0, depth, DEPTH_BLOCK):
                lanes = start + tl.arange(0, DEPTH_BLOCK)
                place = found_ptr + row * depth + lanes
                value = tl.load(place, mask=lanes < depth, other=0.0)
                tl.store(place, value * rescale, mask=lanes < depth)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    tile_ptr,
    result_ptr,
    targets_ptr,
    normalisers_ptr,
    entropies_ptr,
    grad_logps_ptr,
    grad_entropies_ptr,
    first_word,
    width,
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
    raw = tl.load(tile_ptr + row * width + columns, mask=inside, other=0.0)
    capped = _capped(raw, logit_scale, cap, HAS_CAP)
    log_p = capped * inverse_temperature - tl.load(normalisers_ptr + row)
    p = tl.exp(log_p)
    result = tl.zeros((BLOCK,), tl.float32)
    if HAS_LOGPS:
        hit = tl.where(columns == tl.load(targets_ptr + row) - first_word, 1.0, 0.0)
        result += tl.load(grad_logps_ptr + row) * (hit - p)
    if HAS_ENTROPIES:
        entropy = tl.load(entropies_ptr + row)
        result -= tl.load(grad_entropies_ptr + row) * p * (log_p + entropy)
    if HAS_CAP:
        result *= 1 - (capped / cap) * (capped / cap)
    result *= logit_scale * inverse_temperature
    result = result.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + row * width + columns, result, mask=inside)


def fold_tile(
    tile: Tensor,
    targets: Tensor,
    first_word: int,
    state: _Running,
    head: Head,
    dtype: torch.dtype | None,
    found: Tensor | None,
) -> Tensor | None:
    """Folds `tile` [n, words] into `state`; returns the factors in `dtype` if given."""
    written = None if dtype is None else torch.empty_like(tile, dtype=dtype)
    block = triton.next_power_of_2(tile.shape[1])
    _fold_kernel[(len(tile),)](
        tile,
        tile if written is None else written,
        state.total if found is None else found,
        targets,
        state.maximum,
        state.total,
        state.weighted,
        state.target,
        first_word,
        tile.shape[1],
        0 if found is None else found.shape[1],
        float(head.logit_scale),
        float(head.soft_cap or 1.0),
        1.0 / head.temperature,
        HAS_CAP=head.soft_cap is not None,
        WRITE=written is not None,
        BLOCK=block,
        DEPTH_BLOCK=1024,
        num_warps=min(16, max(4, block // 1024)),
    )
    return written


def gradient_tile(
    tile: Tensor,
    targets: Tensor,
    first_word: int,
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
        targets,
        normalisers,
        entropies,
        normalisers if grad_logps is None else grad_logps.contiguous(),
        normalisers if grad_entropies is None else grad_entropies.contiguous(),
        first_word,
        tile.shape[1],
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
