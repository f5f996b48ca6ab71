"""One [tokens, words] tile of logits: its product, its fold into running sums, its gradient.

The torch operations are the definition. On a GPU, the fold and the gradient are Triton kernels,
which read a tile once or twice instead of a dozen times.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None

if TYPE_CHECKING:
    from .chunked_statistics import Head, _Running


def logits(inputs: Tensor, columns: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    """Raw logits [n, words] of `inputs` [n, D] and `columns` [words, D], in float32 or wider."""
    tile = _product(inputs, columns.t())
    if bias is not None:
        tile += bias[words].to(tile.dtype)
    return tile


def fold(
    tile: Tensor,
    targets: Tensor,
    first_word: int,
    state: _Running,
    head: Head,
    dtype: torch.dtype | None,
    found: Tensor | None,
) -> Tensor | None:
    """Folds a tile of the words from `first_word` on into `state`; overwrites both in place.

    With `dtype` and `found`, returns exp(z - maximum) z' in that dtype, with zeros at the targets,
    and rescales `found` [n, D] to the new maximum.
    """
    if _on_triton(tile):
        from .triton_tiles import fold_tile

        return fold_tile(tile, targets, first_word, state, head, dtype, found)
    z = _transform(tile, head)
    slopes = None if head.soft_cap is None else slope(z * head.temperature, head)
    maximum = torch.maximum(state.maximum, z.amax(1))
    shift = state.maximum - maximum
    rescale = shift.exp()
    inside, clamped = _inside(targets - first_word, tile.shape[1])
    state.target.copy_(torch.where(inside, z.gather(1, clamped).squeeze(1), state.target))
    z -= maximum.unsqueeze(1)
    exponentials = z.exp()
    state.weighted.add_(state.total * shift).mul_(rescale)
    state.weighted.add_(z.mul_(exponentials).sum(1))
    state.total.mul_(rescale).add_(exponentials.sum(1))
    state.maximum.copy_(maximum)
    if dtype is None or found is None:
        return None
    if first_word:
        found.mul_(rescale.unsqueeze(1))
    kept = exponentials.gather(1, clamped).masked_fill(inside.unsqueeze(1), 0.0)
    exponentials.scatter_(1, clamped, kept)
    if slopes is not None:
        exponentials *= slopes
    return exponentials.to(dtype)


def gradient(
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
    """Gradient with respect to the raw logits of a tile, in `dtype`; overwrites the tile."""
    if _on_triton(tile):
        from .triton_tiles import gradient_tile

        return gradient_tile(
            tile,
            targets,
            first_word,
            normalisers,
            entropies,
            grad_logps,
            grad_entropies,
            head,
            dtype,
        )
    z = _transform(tile, head)
    slopes = None if head.soft_cap is None else slope(z * head.temperature, head)
    log_p = z.sub_(normalisers.unsqueeze(1))
    result = log_p.exp()
    # d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H)
    if grad_entropies is None:
        assert grad_logps is not None
        result.mul_(-grad_logps.unsqueeze(1))
    else:
        factors = log_p.add_(entropies.unsqueeze(1)).mul_(grad_entropies.unsqueeze(1))
        if grad_logps is not None:
            factors.add_(grad_logps.unsqueeze(1))
        result.mul_(factors.neg_())
    if grad_logps is not None:
        inside, clamped = _inside(targets - first_word, tile.shape[1])
        result.scatter_add_(1, clamped, (grad_logps * inside).unsqueeze(1))
    if slopes is not None:
        result *= slopes
    outer = head.logit_scale / head.temperature
    return (result if outer == 1 else result.mul_(outer)).to(dtype)


def slope(capped: Tensor, head: Head) -> Tensor:
    """Derivative of the soft-cap at the point where its value is `capped`: 1 - (capped / cap)^2."""
    if head.soft_cap is None:
        return torch.ones_like(capped)
    return 1 - (capped / head.soft_cap) ** 2


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `sums`, without rounding the product to the operands' dtype."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)
    else:
        sums.addmm_(left.to(sums.dtype), right.to(sums.dtype))


def _product(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _transform(tile: Tensor, head: Head) -> Tensor:
    """Raw logits to the softmax's input, in place where there is no soft-cap."""
    if head.soft_cap is not None:
        capped = head.soft_cap * torch.tanh(tile * (head.logit_scale / head.soft_cap))
        return capped / head.temperature
    scale = head.logit_scale / head.temperature
    return tile if scale == 1 else tile.mul_(scale)


def _inside(local_targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    inside = (local_targets >= 0) & (local_targets < width)
    return inside, local_targets.clamp(0, width - 1).unsqueeze(1)


def _on_triton(tile: Tensor) -> bool:
    return tile.is_cuda and tile.dtype != torch.float64 and _HAS_TRITON
