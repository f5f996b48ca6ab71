"""Queries, keys and values of new tokens: partial sums added up, head norms and RoPE applied.

Letters: `B` rows, `P` partial sums, `S` slots of the KV pool, `Hq` query heads, `H` key heads, `D`
head size.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_projection import stand_in
from .pdl import launch, launch_dependents, wait


@dataclass(frozen=True)
class NewTokens:
    """Queries, keys and values of one new token per row, as the projection returns them."""

    parts: Tensor
    """`[P, B, (Hq + 2 H) D]`, to be summed over `P`."""
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    norms: tuple[Tensor | None, Tensor | None]
    """Weights `[D]` of the RMSNorms of query and key heads."""
    epsilon: float
    rope: tuple[Tensor, Tensor] | None
    """Cosines and sines by position, `[positions, D]`; None without rotary positions."""
    query_heads: int

    def arguments(self, other: Tensor) -> tuple[Tensor, ...]:
        """Kernel arguments: `parts` and everything else that `head_values` reads."""
        tensors = (*self.biases, *self.norms, *(self.rope or (None, None)))
        return (self.parts, *[stand_in(tensor, other) for tensor in tensors])

    def options(self) -> dict[str, Any]:
        """Constexprs of `head_values`."""
        return {
            "PARTS": self.parts.shape[0],
            "BIAS": self.biases[0] is not None,
            "NORM": self.norms[0] is not None,
            "ROPE": self.rope is not None,
            "EPSILON": self.epsilon,
        }


@triton.jit
def rope_at(cos, sin, position, wide, D: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and signed sines `[D]` of a position."""
    cosine = wide.to(tl.float32)
    sine = cosine
    if ROPE:
        cosine = tl.load(cos + position * D + wide, mask=wide < D, other=0.0).to(tl.float32)
        sine = tl.load(sin + position * D + wide, mask=wide < D, other=0.0).to(tl.float32)
        sine = tl.where(wide < D // 2, -sine, sine)
    return cosine, sine


@triton.jit
def summed(
    parts,
    at,
    stride,
    bias,
    at_bias,
    mask,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sum of the partial results at `at` plus a bias, rounded as the module's output is."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + at_bias, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def head_values(
    parts,
    heads, first, inside, stride,
    bias, norm,
    cosine, sine,
    wide,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    EPSILON: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads `[R, D]` number `heads` `[R]` of the queries, keys or values that begin at `first`.

    RoPE pairs each value with the one half a head away. Both are loaded, since the halves of a
    tensor in registers cannot be swapped.
    """
    mask = inside[:, None] & (wide < D)[None, :]
    own = heads[:, None] * D + wide[None, :]
    value = summed(parts, first + own, stride, bias, own, mask, PARTS, BIAS, DTYPE)
    scale = value
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + EPSILON)[:, None]
        weight = tl.load(norm + wide, mask=wide < D, other=0.0).to(tl.float32)
        value = (value * scale).to(DTYPE).to(tl.float32) * weight[None, :]
        value = value.to(DTYPE).to(tl.float32)
    if ROPE:
        across = tl.where(wide < D // 2, wide + D // 2, wide - D // 2)
        pair = heads[:, None] * D + across[None, :]
        other = summed(parts, first + pair, stride, bias, pair, mask, PARTS, BIAS, DTYPE)
        if NORM:
            weight = tl.load(norm + across, mask=wide < D, other=0.0).to(tl.float32)
            other = (other * scale).to(DTYPE).to(tl.float32) * weight[None, :]
            other = other.to(DTYPE).to(tl.float32)
        value = value * cosine[None, :] + other * sine[None, :]
    return value.to(DTYPE)


@triton.jit
def _write_kv(
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
    D_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    EPSILON: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    TOTAL: tl.constexpr = (HQ + 2 * H) * D
    DTYPE: tl.constexpr = query.dtype.element_ty
    wide = tl.arange(0, D_BLOCK)
    cosine, sine = rope_at(cos, sin, tl.load(positions + row), wide, D, ROPE)
    slot = tl.load(slots + row)
    wait(PDL)
    launch_dependents(PDL)
    mask = (wide < D)[None, :]
    number = tl.zeros((1,), tl.int32)
    own = parts + row * TOTAL
    if head < HQ:
        value = head_values(
            own, number + head, 0, number == 0, M * TOTAL, bias_q, norm_q, cosine, sine, wide,
            D, PARTS, BIAS, NORM, ROPE, EPSILON, DTYPE,
        )  # fmt: skip
        tl.store(query + (row * HQ + head) * D + wide[None, :], value, mask=mask)
    elif head < HQ + H:
        key = head - HQ
        value = head_values(
            own, number + key, HQ * D, number == 0, M * TOTAL, bias_k, norm_k, cosine, sine, wide,
            D, PARTS, BIAS, NORM, ROPE, EPSILON, DTYPE,
        )  # fmt: skip
        tl.store(keys + (slot * H + key) * D + wide[None, :], value, mask=mask)
    else:
        key = head - HQ - H
        value = head_values(
            own, number + key, (HQ + H) * D, number == 0, M * TOTAL, bias_v, norm_k, cosine, sine,
            wide, D, PARTS, BIAS, False, False, EPSILON, DTYPE,
        )  # fmt: skip
        tl.store(values + (slot * H + key) * D + wide[None, :], value, mask=mask)


def write_kv(
    new: NewTokens, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Queries `[B, Hq, D]` with RoPE; keys and values are written to the KV pool `[S, H, D]`.

    `slots` `[B]` says where. For tokens that attend to each other, as those of a prompt do: after
    the call all of their keys are in the pool.
    """
    rows, heads, width = new.parts.shape[1], keys.shape[1], keys.shape[2]
    query = torch.empty(rows, new.query_heads, width, dtype=keys.dtype, device=keys.device)
    launch(
        _write_kv,
        (rows, new.query_heads + 2 * heads),
        keys.device,
        *new.arguments(query),
        positions,
        slots,
        query,
        keys,
        values,
        rows,
        HQ=new.query_heads,
        H=heads,
        D=width,
        D_BLOCK=triton.next_power_of_2(width),
        **new.options(),
        num_warps=1,
    )
    return query
