"""Rollouts in process, on the parameters that are being trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...kernels.decode.token_sampling import Filters
from ...kernels.hardware import free_memory
from ...models import description
from ...models.module_state import decoding
from ..records import Rollout, Sampling
from ..scheduler import PromptGroup, RolloutRequest, batches, group_requests
from ..stop_strings import cut_at_stop
from .cache_attention import ATTENTION, PassThroughCache, attending_to
from .eager_decode import Sampled, eager_decode, prompt_cache

if TYPE_CHECKING:
    from .graph_decode import GraphDecoder

MOST_ROWS = 512
"""Rollouts decoded together."""
DECODERS = ("fused", "graph", "eager")
"""How a step runs on a GPU: fused kernels in a captured graph, the model's own forward in a
captured graph, or that forward alone. Where one is not possible, as on a CPU, the next one runs."""


class NativeEngine:
    """Samples with the model's live parameters: no second copy, no weight synchronisation.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0)
    >>> engine = NativeEngine(Qwen2ForCausalLM(config), tokenizer=None)
    >>> rollouts = engine.generate([[3, 4], [3, 4]], Sampling(max_new_tokens=5), seeds=[0, 1])
    >>> all(1 <= len(rollout.token_ids) <= 5 for rollout in rollouts)
    True
    """

    name = "native"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] | None = None,
        most_rows: int = MOST_ROWS,
        decoder: str = "fused",
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """`stop_token_ids` replaces the end tokens of the tokenizer and the generation config.

        `decoder` is one of DECODERS. `on_note` receives lines that say what is being compiled; by
        default they go to stderr.
        """
        reason = description.unsupported(model, "decode")
        if reason is not None:
            raise NotImplementedError(reason)
        if decoder not in DECODERS:
            raise UserError(f"no decoder named {decoder!r}; choose from {', '.join(DECODERS)}")
        self.model = model
        self.tokenizer = tokenizer
        self.most_rows = most_rows
        self.decoder = decoder
        self._stops = (
            description.stop_tokens(model, tokenizer)
            if stop_token_ids is None
            else tuple(stop_token_ids)
        )
        self._first = description.first_token(model, tokenizer)
        self._vocab = int(description.text_config(model).vocab_size)
        self._on_note = on_note or _to_stderr
        self._graphs: GraphDecoder | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        limits: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """One rollout per prompt, in order; `limits` gives each its own `max_new_tokens`."""
        context = description.context_length(self.model)
        groups = group_requests(prompts, sampling, seeds, limits, context, self._first)
        rollouts: list[Rollout | None] = [None] * len(prompts)
        done = 0

        def on_done(count: int) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(done, len(prompts))

        with decoding(self.model, ATTENTION):
            for batch in batches(groups, self._rows_at_once(groups)):
                sampled = self._decode(batch, filters_of(sampling), on_done)
                _collect(batch, sampled, rollouts)
        return [
            cut_at_stop(rollout, self.tokenizer, sampling.stop)
            for rollout in rollouts
            if rollout is not None
        ]

    def logits(self, tokens: Sequence[int], split: int) -> Tensor:
        """Logits `[len(tokens) - split + 1, V]` after `split` tokens and after each further one.

        The first `split - 1` tokens go through the prefill, the others through eager decoding.
        """
        device = self.device
        with decoding(self.model, ATTENTION):
            group = PromptGroup(tuple(tokens[:split]), (RolloutRequest(0, 0, len(tokens)),))
            cache = prompt_cache([group], self._forward, device)
            cache.arrange(torch.zeros(1, dtype=torch.long, device=device), 1, None)
            found = []
            for step, token in enumerate(tokens[split - 1 :]):
                cache.step = step
                place = torch.tensor([[token], [split - 1 + step]], device=device)
                with attending_to(cache):
                    found.append(self._forward(place[:1], place[1:], cache))
        return torch.cat(found).float()

    def _decode(
        self, batch: Sequence[PromptGroup], filters: Filters, on_done: Callable[[int], None]
    ) -> Sampled:
        stops = torch.tensor(self._stops, dtype=torch.long, device=self.device)
        graphs = self._graph_decoder()
        if graphs is not None:
            return graphs.decode(batch, filters, stops, on_done)
        return eager_decode(batch, self._forward, filters, stops, self._vocab, on_done)

    @property
    def device(self) -> torch.device:
        """The device of the parameters, which may have moved."""
        return next(self.model.parameters()).device

    def release(self) -> None:
        """Frees what is kept on a GPU between calls; the next call allocates it again."""
        if self._graphs is not None:
            self._graphs.release()

    def _graph_decoder(self) -> GraphDecoder | None:
        """The graph decoder, on a GPU and unless it is switched off."""
        device = self.device
        if device.type != "cuda" or self.decoder == "eager":
            return None
        if self._graphs is None or self._graphs.device != device:
            # Imported here: it needs Triton, which a machine without a GPU may not have.
            from .graph_decode import GraphDecoder

            self._graphs = GraphDecoder(
                self.model,
                self._forward,
                self._vocab,
                self._on_note,
                fused=self.decoder == "fused",
            )
        return self._graphs

    def _rows_at_once(self, groups: Sequence[PromptGroup]) -> int:
        """As many rows as the device has memory for their keys and values."""
        graphs = self._graph_decoder()
        if graphs is None or not groups:
            return self.most_rows
        free = free_memory(self.device)
        longest = max(len(group.prompt) + row.limit for group in groups for row in group.rows)
        return max(1, min(self.most_rows, int(0.7 * free) // (graphs.token_bytes() * longest)))

    def _forward(self, tokens: Tensor, positions: Tensor, cache: PassThroughCache) -> Tensor:
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _to_stderr(line: str) -> None:
    print(f"native engine: {line}", file=sys.stderr, flush=True)


def filters_of(sampling: Sampling) -> Filters:
    """The part of a request that sampling needs.

    >>> filters_of(Sampling(top_k=3)).top_k
    3
    """
    return Filters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        greedy=sampling.greedy,
    )


def _collect(
    batch: Sequence[PromptGroup], sampled: Sampled, rollouts: list[Rollout | None]
) -> None:
    """Converts a batch's tensors to records, each at its position in the request."""
    width = sampled.tokens.shape[1]
    drawn = torch.arange(width, device=sampled.lengths.device) < sampled.lengths[:, None]
    tokens, logps, entropies = (
        values[drawn].tolist() for values in (sampled.tokens, sampled.logps, sampled.entropies)
    )
    ends, finished = sampled.lengths.cumsum(0).tolist(), sampled.finished.tolist()
    start = place = 0
    for group in batch:
        for row in group.rows:
            own = slice(start, ends[place])
            rollouts[row.index] = Rollout(
                prompt_ids=group.prompt,
                token_ids=tuple(tokens[own]),
                logps=tuple(logps[own]),
                entropies=tuple(entropies[own]),
                finished=finished[place],
            )
            start = ends[place]
            place += 1
