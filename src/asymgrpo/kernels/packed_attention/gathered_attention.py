"""Packed attention without flex attention: queries and keys copied to one padded row per segment.

Prompts and rollouts are separate batches, so that neither pads the other. Two implementations
agree:

- short rows, in float32 or wider: plain matrix products over batches of rows of similar length,
  each batch small enough that its scores stay in a CPU's cache. Query heads that share a key head
  are one product;
- everything else: torch's scaled-dot-product attention, which does not materialise the scores, or
  the definition where scores are soft-capped.

N packed tokens, S segments of a batch, Q queries and C keys per row, H heads, K key heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .segment_attention import Segments

Array = np.ndarray[Any, Any]

SHORT = 256
"""Rows with more keys than this are faster with torch's attention."""
_MOST_SCORES = 2**16
"""Scores per head in a batch of short rows, at most."""
_WORTH_A_BATCH = 10_000
"""Scores per head that cost as much as the overhead of one more batch."""


@dataclass(frozen=True)
class _Rows:
    """A batch of segments as padded rows of indices into the packed sequence."""

    queries: Tensor  # [S, Q]
    keys: Tensor  # [S, C]
    seen: Tensor  # [S, 1, Q, C], True where a query sees a key
    kept: Tensor  # [S, Q], False where a query is padding


@dataclass(frozen=True)
class _HeadRows:
    """The same per head: tokens and heads share one index, as in `[N * H, D]`."""

    queries: Tensor  # [S * H * Q]
    keys: Tensor  # [S * K * C]
    bias: Tensor  # [S, 1, Q, C], added to the scores
    padding: Tensor  # [S, 1, Q, 1]

    def __post_init__(self) -> None:
        rows, _, queries, keys = self.bias.shape
        if self.padding.shape != (rows, 1, queries, 1) or len(self.keys) % (rows * keys):
            raise ValueError("queries, keys, bias and padding disagree")


@dataclass(frozen=True)
class GatheredPlan:
    """Batches of rows, and where each token's result is among theirs."""

    batches: list[_Rows]
    short: bool
    order: Tensor  # [N] into the rows' queries, one batch after the other
    _by_head: dict[tuple[int, int, torch.dtype], tuple[list[_HeadRows], Tensor]] = field(
        default_factory=dict
    )

    def by_head(
        self, heads: int, key_heads: int, dtype: torch.dtype
    ) -> tuple[list[_HeadRows], Tensor]:
        """The batches for these heads and the order `[N * H]` of their results; cached."""
        wanted = (heads, key_heads, dtype)
        if wanted not in self._by_head:
            order = self.order.new_empty(len(self.order), heads)
            found, start = [], 0
            for rows in self.batches:
                size = (len(rows.kept), heads, rows.kept.shape[1])
                end = start + size[0] * size[1] * size[2]
                places = torch.arange(start, end, device=order.device).view(size).transpose(1, 2)
                order[rows.queries[rows.kept]] = places[rows.kept]
                bias = torch.zeros(rows.seen.shape, dtype=dtype, device=order.device)
                found.append(
                    _HeadRows(
                        _with_heads(rows.queries, heads),
                        _with_heads(rows.keys, key_heads),
                        bias.masked_fill_(~rows.seen, -torch.inf),
                        ~rows.kept[:, None, :, None],
                    )
                )
                start = end
            self._by_head[wanted] = found, order.flatten()
        return self._by_head[wanted]


def _with_heads(tokens: Tensor, heads: int) -> Tensor:
    """Tokens [S, Q] as indices [S * H * Q] into tokens and heads."""
    return (tokens[:, None] * heads + torch.arange(heads, device=tokens.device)[:, None]).flatten()


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: GatheredPlan,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Attends `query` [1, H, N, D] to `key` and `value` [1, K, N, D]; returns [1, N, H, D]."""
    wide = query.dtype in (torch.float32, torch.float64)
    lowered = torch.is_autocast_enabled(query.device.type) or torch.compiler.is_compiling()
    if plan.short and wide and softcap is None and not lowered:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        attended: Tensor = _ShortRows.apply(  # type: ignore[no-untyped-call]
            query, key, value, plan, scale
        )
        return attended
    tokens, heads = query.shape[2], query.shape[1]
    by_token = [_by_token(x).flatten(1) for x in (query, key, value)]
    attend: Callable[..., Tensor] = _dense_attention if softcap is None else _capped_attention
    results = []
    for rows in plan.batches:
        q, k, v = (
            x.index_select(0, index.reshape(-1))
            .view(*index.shape, source.shape[1], source.shape[3])
            .transpose(1, 2)
            for x, index, source in zip(
                by_token, (rows.queries, rows.keys, rows.keys), (query, key, value), strict=True
            )
        )
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        attended = attend(q, k, v, rows.seen, scaling, softcap)
        results.append(attended.transpose(1, 2).reshape(-1, heads * value.shape[3]))
    return torch.cat(results).index_select(0, plan.order).view(1, tokens, heads, value.shape[3])


def _by_token(states: Tensor) -> Tensor:
    """[1, H, N, D] as [N, H, D], the memory layout of a model's projections."""
    return states[0].transpose(0, 1)


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float | None, _: float | None
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scale / softcap))
    scores = scores.masked_fill(~seen, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype) @ v


class _ShortRows(torch.autograd.Function):
    """Softmax attention over short rows; the weights are saved for the backward pass.

    Written by hand because autograd would spend more on copies and zero-fills than on arithmetic: a
    query's result and gradient have one place each, so both are gathers, and only the gradients of
    keys and values are accumulated.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: GatheredPlan, scale: float
    ) -> Tensor:
        heads, key_heads = query.shape[1], key.shape[1]
        batches, order = plan.by_head(heads, key_heads, query.dtype)
        width = value.shape[-1]
        queries, keys, values = (_by_token(x).reshape(-1, x.shape[-1]) for x in (query, key, value))
        results = values.new_empty(sum(len(rows.queries) for rows in batches), width)
        saved, start = [], 0
        for rows in batches:
            products = len(rows.bias) * key_heads
            q = queries.index_select(0, rows.queries).mul_(scale)
            q = q.view(products, -1, q.shape[-1])
            k, v = (
                x.index_select(0, rows.keys).view(products, -1, x.shape[-1]) for x in (keys, values)
            )
            scores = torch.bmm(q, k.transpose(1, 2))
            scores.view(len(rows.bias), heads, *rows.bias.shape[2:]).add_(rows.bias)
            weights = scores.softmax(-1)
            end = start + len(rows.queries)
            torch.bmm(weights, v, out=results[start:end].view(products, -1, width))
            saved += [q, k, v, weights]
            start = end
        ctx.save_for_backward(*saved)
        ctx.batches, ctx.order, ctx.scale = batches, order, scale
        ctx.shapes = [_by_token(x).shape for x in (query, key, value)]
        return results.index_select(0, order).view(1, -1, heads, width)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens, heads, size), (_, key_heads, _), (_, _, width) = ctx.shapes
        gradient = gradient.reshape(-1, width)
        to_keys = gradient.new_zeros(tokens * key_heads, size)
        to_values = gradient.new_zeros(tokens * key_heads, width)
        to_queries = gradient.new_empty(sum(len(rows.queries) for rows in ctx.batches), size)
        saved, start = iter(ctx.saved_tensors), 0
        for rows in ctx.batches:
            q, k, v, weights = (next(saved) for _ in range(4))
            to_results = gradient.index_select(0, rows.queries)
            by_row = to_results.view(len(rows.bias), heads, -1, width)
            by_row.masked_fill_(rows.padding, 0.0)
            to_results = to_results.view(len(q), -1, width)
            found = torch.bmm(weights.transpose(1, 2), to_results)
            to_values.index_add_(0, rows.keys, found.view(-1, width))
            to_weights = torch.bmm(to_results, v.transpose(1, 2))
            to_scores = torch.ops.aten._softmax_backward_data(
                to_weights, weights, -1, weights.dtype
            )
            found = torch.bmm(to_scores.transpose(1, 2), q)
            to_keys.index_add_(0, rows.keys, found.view(-1, size))
            end = start + len(rows.queries)
            torch.bmm(to_scores, k, out=to_queries[start:end].view(len(q), -1, size))
            start = end
        to_queries = to_queries.index_select(0, ctx.order).mul_(ctx.scale)
        return (
            *(
                x.view(shape).transpose(0, 1)[None]
                for x, shape in zip((to_queries, to_keys, to_values), ctx.shapes, strict=True)
            ),
            None,
            None,
        )


def gathered_plan(segments: Segments, device: torch.device, window: int | None) -> GatheredPlan:
    """Padded rows of the prompts and of the rollouts, and where each token's result is."""
    lengths = segments.end - segments.start
    context = lengths + segments.prompt_end - segments.prompt_start
    is_prompt = segments.prompt_end == segments.prompt_start
    short = bool(context.max(initial=0) <= SHORT)
    chosen = [np.flatnonzero(which & (lengths > 0)) for which in (is_prompt, ~is_prompt)]
    chosen = [rows for rows in chosen if len(rows)]
    if short:
        chosen = [part for rows in chosen for part in _batched(rows, lengths, context)]
    order = np.zeros(segments.tokens, np.int64)
    batches, start = [], 0
    for rows in chosen:
        queries, keys, seen, kept = _padded(segments, rows, window)
        order[queries[kept]] = start + np.flatnonzero(kept)
        start += kept.size
        arrays = (queries, keys, seen[:, None], kept)
        batches.append(_Rows(*(torch.from_numpy(x).to(device) for x in arrays)))
    return GatheredPlan(batches, short, torch.from_numpy(order).to(device))


def _batched(rows: Array, lengths: Array, context: Array) -> list[Array]:
    """Groups segments of similar size, trading padded scores against the number of batches."""
    rows = rows[np.argsort(-lengths[rows] * context[rows], kind="stable")]
    scores = lengths[rows] * context[rows]
    # Split in two where that leaves the fewest scores, padding included.
    before = np.arange(len(rows))
    total = before * scores[0] + (len(rows) - before) * scores
    best = int(total.argmin())
    if total[0] - total[best] > _WORTH_A_BATCH:
        halves = (rows[:best], rows[best:])
        return [part for half in halves for part in _batched(half, lengths, context)]
    most = max(1, _MOST_SCORES // int(scores[0]))
    return np.array_split(rows, -(-len(rows) // most))


def _padded(
    segments: Segments, rows: Array, window: int | None
) -> tuple[Array, Array, Array, Array]:
    """Indices of queries [S, Q] and keys [S, C], pairs seen [S, Q, C], real queries [S, Q]."""
    start, end = segments.start[rows, None], segments.end[rows, None]
    prompt_start = segments.prompt_start[rows, None]
    prompt_length = segments.prompt_end[rows, None] - prompt_start
    own = np.arange((end - start).max())
    shared = np.arange(prompt_length.max())
    # A padded entry points at some token; no result that is kept attends to it.
    queries = np.minimum(start + own, end - 1)
    keys = np.concatenate(
        [np.where(shared < prompt_length, prompt_start + shared, start), queries], axis=1
    )
    shape = (len(rows), len(own))
    seen = np.concatenate(
        [
            np.broadcast_to((shared < prompt_length)[:, None, :], (*shape, len(shared))),
            np.broadcast_to(own[None, :, None] >= own[None, None, :], (*shape, len(own))),
        ],
        axis=2,
    )
    if window is not None:
        places = segments.positions
        distance = places[queries][:, :, None] - places[keys][:, None, :]
        seen = seen & (distance < window)
    return queries, keys, seen, start + own < end
