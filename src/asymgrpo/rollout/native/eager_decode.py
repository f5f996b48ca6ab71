"""Decoding without graphs: one forward per step; finished rows are removed by compaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.decode.token_sampling import Filters, draw, noise_keys
from ..scheduler import PromptGroup
from .cache_attention import attending_to
from .grouped_kv_cache import GroupedKVCache, chunk_size
from .prefill import Forward, prompt_states

KEEP_SHARE = 0.8
"""Rows are compacted once fewer than this share of them are active."""


@dataclass
class Sampled:
    """What a batch produced, `[rows, steps]` each, and how many steps of each row count."""

    tokens: Tensor
    logps: Tensor
    entropies: Tensor
    lengths: Tensor
    finished: Tensor


@dataclass
class _Places:
    """Which rollout is where in the batch; finished rows stay until compaction."""

    rows: Tensor
    """`[B]`, the rollout of each place; -1 for an empty place."""
    alive: Tensor
    tokens: Tensor
    positions: Tensor
    seeds: Tensor
    limits: Tensor
    groups: Tensor
    seen: Tensor | None


@torch.no_grad()
def eager_decode(
    groups: Sequence[PromptGroup],
    forward: Forward,
    filters: Filters,
    stops: Tensor,
    vocab: int,
    on_done: Callable[[int], None],
) -> Sampled:
    """Samples all rollouts of these groups, in their order."""
    device = stops.device
    rows = [row for group in groups for row in group.rows]
    steps = max(row.limit for row in rows)
    out = torch.zeros(3, len(rows) + 1, steps, dtype=torch.float64, device=device)
    lengths = torch.zeros(len(rows) + 1, dtype=torch.long, device=device)
    finished = torch.zeros(len(rows) + 1, dtype=torch.bool, device=device)
    places = _first_places(groups, device, vocab if filters.repetition_penalty != 1 else None)
    cache = prompt_cache(groups, forward, device)
    places = _compacted(places, cache, first=True)
    for step in range(steps):
        cache.step = step
        with attending_to(cache):
            logits = forward(places.tokens[:, None], places.positions[:, None], cache)
        keys = noise_keys(places.seeds, torch.full_like(places.seeds, step))
        tokens, logps, entropies = draw(logits, keys, filters, places.seen)
        drawn = torch.stack((tokens.double(), logps.double(), entropies.double()))
        out[:, places.rows, step] = drawn
        stopped = torch.isin(tokens, stops)
        ended = places.alive & (stopped | (places.limits <= step + 1))
        done = int(ended.sum())
        if done:
            lengths[places.rows[ended]] = step + 1
            finished[places.rows[ended]] = stopped[ended]
            on_done(done)
        places.alive &= ~ended
        places.tokens, places.positions = tokens, places.positions + 1
        if places.seen is not None:
            places.seen.scatter_(1, tokens[:, None], True)
        alive = int(places.alive.sum()) if done else len(places.alive)
        if alive == 0:
            break
        if alive < KEEP_SHARE * len(places.alive):
            places = _compacted(places, cache)
    ids, logps, entropies = out[:, :-1]
    return Sampled(ids.long(), logps, entropies, lengths[:-1], finished[:-1])


def _first_places(
    groups: Sequence[PromptGroup], device: torch.device, vocab: int | None
) -> _Places:
    rows = [(number, group, row) for number, group in enumerate(groups) for row in group.rows]

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    seen = None
    if vocab is not None:
        seen = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
        for place, (_, group, _) in enumerate(rows):
            seen[place, column(list(group.prompt))] = True
    return _Places(
        rows=torch.arange(len(rows), device=device),
        alive=torch.ones(len(rows), dtype=torch.bool, device=device),
        tokens=column([group.prompt[-1] for _, group, _ in rows]),
        positions=column([len(group.prompt) - 1 for _, group, _ in rows]),
        seeds=column([row.seed for _, _, row in rows]),
        limits=column([row.limit for _, _, row in rows]),
        groups=column([number for number, _, _ in rows]),
        seen=seen,
    )


def prompt_cache(
    groups: Sequence[PromptGroup], forward: Forward, device: torch.device
) -> GroupedKVCache:
    """The prompts' keys and values, computed once per group."""
    batches = prompt_states(groups, forward, device)
    longest = max(len(group.prompt) for group in groups) - 1

    def whole(parts: list[dict[int, Tensor]]) -> dict[int, Tensor]:
        # Prompts are sorted by falling length, so the first batch has states if any has.
        padded = {}
        for layer, like in parts[0].items():
            empty = [like[:1, :, :0].expand(len(batch.counts), -1, -1, -1) for batch in batches]
            states = [part.get(layer, none) for part, none in zip(parts, empty, strict=True)]
            padded[layer] = torch.cat([pad(s, (0, 0, 0, longest - s.shape[2])) for s in states])
        return padded

    counts = torch.tensor([count for batch in batches for count in batch.counts], device=device)
    keys, values = [batch.keys for batch in batches], [batch.values for batch in batches]
    return GroupedKVCache(whole(keys), whole(values), counts)


def _compacted(places: _Places, cache: GroupedKVCache, first: bool = False) -> _Places:
    """The active rows only, in new chunks."""
    active = places.alive.nonzero()[:, 0]
    owners = places.groups[active]
    order = torch.argsort(owners, stable=True)
    active, owners = active[order], owners[order]
    numbers, counts = torch.unique_consecutive(owners, return_counts=True)
    size = chunk_size(counts.tolist())
    chosen: list[int] = []
    empty: list[bool] = []
    chunks: list[int] = []
    start = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        filled = -(-count // size) * size
        chosen += [*range(start, start + count), *[start] * (filled - count)]
        empty += [False] * count + [True] * (filled - count)
        chunks += [number] * (filled // size)
        start += count
    device = active.device
    former = active[torch.tensor(chosen, device=device)]
    idle = torch.tensor(empty, device=device)
    cache.arrange(torch.tensor(chunks, device=device), size, None if first else former)
    empty_place = torch.full_like(former, -1)
    return _Places(
        rows=torch.where(idle, empty_place, places.rows[former]),
        alive=~idle,
        tokens=places.tokens[former],
        positions=places.positions[former],
        seeds=places.seeds[former],
        limits=places.limits[former],
        groups=places.groups[former],
        seen=None if places.seen is None else places.seen[former],
    )
