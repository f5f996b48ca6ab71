"""Decoding in captured CUDA graphs: a step is one launch, and the rows' state stays on the device.

A graph serves one batch size, a bucket, at any length. Every few steps the host copies which rows
are active, without a device sync; when they fit a smaller bucket, their state moves to its front.
Keys and values stay where they are in the pool, since rows refer to their slots. Inside the graph,
the forward is that of the fused kernels where they cover the model, and the model's own elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from ...kernels.decode.decode_attention import Contexts
from ...kernels.decode.fused_sampling import Rows, advance, draw_unfiltered
from ...kernels.decode.token_sampling import Filters, draw, noise_keys
from ...models.self_test import disagreement
from ..scheduler import PromptGroup
from .active_rows import ActiveRows, HostCopy
from .cache_attention import PrefillCache, attending_to
from .decode_buffers import CONTEXT_FIELDS, ROW_FIELDS, Buffers
from .eager_decode import Sampled
from .fused_decode import (
    AdapterCasts,
    DecodePlan,
    NotFusable,
    RopeTable,
    build_plan,
    fused_hidden,
    fused_logits,
)
from .kv_pool import KVPool, LayerShape
from .prefill import Forward, prompt_states

BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
POLL_EVERY = 16
"""Steps between two copies of the active rows to the host."""
POLL_AHEAD = 2
"""Steps issued behind a copy: enough for the host to plan the next ones while the device is busy,
and few enough that a stop token is noticed soon."""

LONGEST_FUSED_PROMPT = 1_024
"""Longer prompts use the model's own forward, whose attention shares reads between queries."""
MOST_PROMPT_TOKENS = 8_192
"""Prompt tokens per forward of the fused kernels."""


class _Disagrees(Exception):
    """The fused kernels give other logits than the model."""


class GraphDecoder:
    """Decodes batches; buffers and graphs are kept for the next.

    `fused` allows the fused kernels; without them, graphs run the model's own forward.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        vocab: int,
        on_note: Callable[[str], None],
        *,
        fused: bool = True,
    ) -> None:
        self.model, self.forward, self.vocab, self.on_note = model, forward, vocab, on_note
        self.device = next(model.parameters()).device
        self._shapes: dict[int, LayerShape] | None = None
        self._buffers: Buffers | None = None
        self._graphs: dict[Any, Any] = {}
        self._captured_for: Any = None
        self._memory: Any = None
        self._plan: DecodePlan | None = None
        self._fuses = fused
        self._agrees = False
        self._casts = AdapterCasts()
        self._rope_table = RopeTable()

    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        return sum(shape.bytes for shape in self._layer_shapes().values())

    def release(self) -> None:
        """Frees the buffers and graphs; the next batch allocates and captures them again."""
        self._graphs.clear()
        self._casts.clear()
        self._rope_table.clear()
        self._buffers = self._captured_for = self._memory = self._plan = None

    @torch.no_grad()
    def decode(
        self,
        groups: Sequence[PromptGroup],
        filters: Filters,
        stops: Tensor,
        on_done: Callable[[int], None],
    ) -> Sampled:
        """Samples all rollouts of these groups, in their order."""
        done = reported = 0

        def on_more(count: int) -> None:
            nonlocal done, reported
            done += count
            if done > reported:
                on_done(done - reported)
                reported = done

        try:
            return self._decode(groups, filters, stops, on_more)
        except (OutOfResources, _Disagrees) as error:
            if self._plan is None:
                raise
            self.on_note(f"decoding by the model's own kernels: {error}")
            self._fuses = False
            self.release()
            done = 0  # start over, but report nothing twice
            return self._decode(groups, filters, stops, on_more)

    def _decode(
        self,
        groups: Sequence[PromptGroup],
        filters: Filters,
        stops: Tensor,
        on_done: Callable[[int], None],
    ) -> Sampled:
        stop_ids = tuple(stops.tolist())  # a device sync, before there is work to wait for
        requests = [row for group in groups for row in group.rows]
        steps = max(row.limit for row in requests)
        prompt_tokens = sum(len(group.prompt) - 1 for group in groups)
        positions = max(len(group.prompt) + row.limit for group in groups for row in group.rows)
        buffers = self._ready(len(requests), steps, prompt_tokens, positions, filters)
        buffers.start(groups, steps, self._store_prompts(buffers.pool, groups))
        if self._plan is not None and not self._agrees:
            self._compare(buffers, groups)
        ends = torch.zeros(2, buffers.state.shape[1] + 1, dtype=torch.long, device=self.device)
        rows = ActiveRows([row.limit for row in requests])
        bucket, alive = _bucket(len(requests)), len(requests)
        while alive:
            self._advance(self._step(buffers, bucket, filters, stops, stop_ids), buffers, rows)
            if rows.count < alive:
                on_done(alive - rows.count)
                alive = rows.count
            smaller = _bucket(alive)
            if alive and smaller < bucket:
                buffers.store_ends(bucket, ends)
                buffers.compact(rows.compact(), bucket, smaller)
                bucket = smaller
        buffers.store_ends(bucket, ends)
        tokens, logps, entropies = (result[: len(requests), :steps] for result in buffers.results)
        lengths, finished = ends[:, : len(requests)]
        return Sampled(tokens, logps, entropies, lengths, finished > 0)

    def _advance(self, replay: Callable[[], None], buffers: Buffers, rows: ActiveRows) -> None:
        """Issues some steps and refreshes the active rows without a device sync."""
        steps, copy = min(POLL_EVERY, rows.needed), None
        for left in range(steps, 0, -1):
            # Where their limits end all rows, there is nothing to find out.
            if left == min(POLL_AHEAD, steps) and steps < rows.needed:
                copy = HostCopy(buffers.alive(len(rows)))
            replay()
        rows.advance(steps)
        if copy is not None:
            rows.observe(copy.values())

    def _compare(self, buffers: Buffers, groups: Sequence[PromptGroup]) -> None:
        """Compares the first logits of the shortest prompt with the model's own; raises if wrong.

        The kernels may not have been run on this kind of GPU before.
        """
        shortest = min(range(len(groups)), key=lambda number: len(groups[number].prompt))
        row = sum(len(group.rows) for group in groups[:shortest])
        rows, contexts = buffers.views(_bucket(sum(len(group.rows) for group in groups)))
        fused = self._logits(rows, contexts, buffers.pool)[row].float()
        prompt = torch.tensor([groups[shortest].prompt], device=self.device)
        cache = PrefillCache()
        with attending_to(cache):
            own = self.forward(
                prompt, torch.arange(prompt.shape[1], device=self.device)[None], cache
            )
        dtype = next(iter(self._layer_shapes().values())).dtype
        own = own[0].float()
        error = disagreement(fused - own, own.log_softmax(-1), dtype)
        if error is not None:
            raise _Disagrees(f"the fused ones are off by {error:.1%} on this device")
        self._agrees = True

    def _layer_shapes(self) -> dict[int, LayerShape]:
        if self._shapes is None:
            cache = PrefillCache()
            zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with attending_to(cache), torch.no_grad():
                self.forward(zero, zero, cache)
            self._shapes = {
                layer: LayerShape(keys.shape[1], keys.shape[3], keys.dtype)
                for layer, keys in cache.keys.items()
            }
        return self._shapes

    def _ready(
        self, rows: int, steps: int, prompt_tokens: int, positions: int, filters: Filters
    ) -> Buffers:
        """Buffers that are large enough; drops graphs of tensors that the model no longer uses."""
        held = self._buffers
        needs_seen = filters.repetition_penalty != 1
        slots = rows * steps + prompt_tokens + 1
        if (
            held is None
            or held.pool.size < slots
            or held.state.shape[1] < _bucket(rows)
            or held.results[0].shape[0] <= rows
            or held.results[0].shape[1] < steps
            or (needs_seen and held.seen is None)
        ):
            self.release()
            held = self._buffers = self._allocate(rows, steps, prompt_tokens, needs_seen)
        dtype = next(iter(self._layer_shapes().values())).dtype
        try:
            if not self._fuses:
                raise NotFusable("the fused kernels are switched off, or failed on this device")
            self._plan = build_plan(self.model, dtype, positions, self._casts, self._rope_table)
            self._casts.refresh()
            fingerprint: Any = self._plan.fingerprint()
        except NotFusable:
            self._plan = None
            fingerprint = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if fingerprint != self._captured_for:
            self._graphs.clear()
            self._captured_for = fingerprint
        return held

    def _allocate(self, rows: int, steps: int, prompt_tokens: int, seen: bool) -> Buffers:
        bucket = _bucket(rows)
        # Prompts differ from call to call; a quarter more room avoids most reallocations.
        slots = rows * steps + prompt_tokens + prompt_tokens // 4 + 1_024
        pool = KVPool(self._layer_shapes(), slots, self.device)
        count = len(ROW_FIELDS) + len(CONTEXT_FIELDS)
        shape = (bucket + 1, steps)
        return Buffers(
            pool=pool,
            state=torch.zeros(count, bucket, dtype=torch.long, device=self.device),
            results=(
                torch.zeros(shape, dtype=torch.int32, device=self.device),
                torch.zeros(shape, device=self.device),
                torch.zeros(shape, device=self.device),
            ),
            seen=torch.zeros(bucket, self.vocab, dtype=torch.bool, device=self.device)
            if seen
            else None,
        )

    def _store_prompts(self, pool: KVPool, groups: Sequence[PromptGroup]) -> int:
        """Stores the prompts' keys and values from slot 1 on; returns the slot after them."""
        counts = [len(group.prompt) - 1 for group in groups]
        start = 1
        if self._plan is None or max(counts) > LONGEST_FUSED_PROMPT:
            for states in prompt_states(groups, self.forward, self.device):
                start = pool.add_prompts(states, start)
            return start
        columns: list[list[int]] = [[], [], [], []]
        for group, count in zip(groups, counts, strict=True):
            columns[0] += group.prompt[:-1]
            columns[1] += range(count)
            columns[2] += [start] * count
            columns[3] += range(start, start + count)
            start += count
        table = torch.tensor(columns, device=self.device)
        for part in torch.split(table, MOST_PROMPT_TOKENS, dim=1):
            tokens, positions, first, slots = part.contiguous()
            if len(tokens):
                none = torch.zeros_like(first)
                contexts = Contexts(none, none, first, positions + 1)
                fused_hidden(self._plan, tokens, contexts, pool, (positions, slots))
        return start

    def _step(
        self,
        buffers: Buffers,
        bucket: int,
        filters: Filters,
        stops: Tensor,
        stop_ids: tuple[int, ...],
    ) -> Callable[[], None]:
        """A function that decodes one token for the first `bucket` rows: on a GPU, a graph."""

        def run() -> None:
            self._run(buffers, bucket, filters, stops)

        if self.device.type != "cuda":
            return run
        key = (bucket, filters, stop_ids)
        if key not in self._graphs:
            begin = time.perf_counter()
            self._graphs[key] = self._capture(buffers, run), stops
            seconds = time.perf_counter() - begin
            kernels = "fused kernels" if self._plan is not None else "the model's own kernels"
            self.on_note(f"decoding of {bucket} rows compiled ({kernels}, {seconds:.1f} s)")
        graph, _ = self._graphs[key]
        replay: Callable[[], None] = graph.replay
        return replay

    def _capture(self, buffers: Buffers, run: Callable[[], None]) -> Any:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        # The first run compiles kernels; its effect on the rows is undone below.
        state = buffers.state.clone()
        seen = None if buffers.seen is None else buffers.seen.clone()
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            run()
        buffers.state.copy_(state)
        if seen is not None and buffers.seen is not None:
            buffers.seen.copy_(seen)
        return graph

    def _run(self, buffers: Buffers, bucket: int, filters: Filters, stops: Tensor) -> None:
        rows, contexts = buffers.views(bucket)
        logits = self._logits(rows, contexts, buffers.pool)
        if filters.unfiltered:
            drawn = draw_unfiltered(
                logits, rows.seed, rows.count, filters.temperature, filters.greedy
            )
        else:
            seen = None if buffers.seen is None else buffers.seen[:bucket]
            if filters.repetition_penalty == 1:
                seen = None
            drawn = draw(logits, noise_keys(rows.seed, rows.count), filters, seen)
            if seen is not None:
                seen.scatter_(1, drawn[0][:, None], True)
        advance(drawn, rows, buffers.results, stops)

    def _logits(self, rows: Rows, contexts: Contexts, pool: KVPool) -> Tensor:
        if self._plan is not None:
            return fused_logits(self._plan, rows.token, contexts, pool)
        pool.contexts, pool.slots = contexts, rows.slot
        with attending_to(pool):
            return self.forward(rows.token[:, None], rows.position[:, None], pool)


def _bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows.

    >>> _bucket(1), _bucket(100), _bucket(128)
    (16, 128, 128)
    """
    for bucket in BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // 128) * 128
