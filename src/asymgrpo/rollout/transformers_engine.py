"""Rollouts by transformers' `generate`: slower, but runs every model that transformers runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..kernels.decode.token_sampling import Filters, draw, noise_keys
from ..models import description
from ..models.module_state import decoding
from .native.native_engine import filters_of
from .records import Rollout, Sampling
from .scheduler import PromptGroup, RolloutRequest, batches, group_requests
from .stop_strings import cut_at_stop

MOST_ROWS = 512


class TransformersEngine:
    """`model.generate` behind the engine protocol, with one seed per rollout.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0)
    >>> engine = TransformersEngine(Qwen2ForCausalLM(config), tokenizer=None)
    >>> rollout, = engine.generate([[3, 4]], Sampling(max_new_tokens=5), seeds=[0])
    >>> 1 <= len(rollout.token_ids) <= 5
    True
    """

    name = "transformers"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] | None = None,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """`stop_token_ids` replaces the end tokens of the tokenizer and the generation config."""
        self.model = model
        self.tokenizer = tokenizer
        self.most_rows = most_rows
        self._stops = (
            description.stop_tokens(model, tokenizer)
            if stop_token_ids is None
            else tuple(stop_token_ids)
        )
        self._first = description.first_token(model, tokenizer)

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
        found: dict[int, Rollout] = {}
        with decoding(self.model, None):
            for batch in batches(groups, self.most_rows):
                found.update(self._batch(batch, filters_of(sampling)))
                if on_progress is not None:
                    on_progress(len(found), len(prompts))
        return [
            cut_at_stop(found[index], self.tokenizer, sampling.stop)
            for index in range(len(prompts))
        ]

    def _batch(self, batch: Sequence[PromptGroup], filters: Filters) -> dict[int, Rollout]:
        rows = [(group.prompt, row) for group in batch for row in group.rows]
        device = next(self.model.parameters()).device
        longest = max(len(prompt) for prompt, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, (prompt, _) in enumerate(rows):
            ids[place, longest - len(prompt) :] = torch.tensor(prompt)
            mask[place, longest - len(prompt) :] = 1
        sampler = _SeededSampling(rows, filters, longest, device)
        generate: Any = self.model.generate
        configured: Any = GenerationConfig
        output = generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            # The processor has sampled already and left one token, which greedy search takes.
            generation_config=configured(
                do_sample=False,
                max_new_tokens=max(row.limit for _, row in rows),
                eos_token_id=list(self._stops) or None,
                pad_token_id=0,
            ),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([_OwnLimits(rows, longest, device)]),
        )
        return self._rollouts(rows, output[:, longest:].tolist(), sampler)

    def _rollouts(
        self,
        rows: list[tuple[tuple[int, ...], RolloutRequest]],
        drawn: list[list[int]],
        sampler: _SeededSampling,
    ) -> dict[int, Rollout]:
        logps = torch.stack(sampler.logps, dim=1).tolist()
        entropies = torch.stack(sampler.entropies, dim=1).tolist()
        result = {}
        for place, (prompt, row) in enumerate(rows):
            tokens = drawn[place][: row.limit]
            ends = [index for index, token in enumerate(tokens) if token in self._stops]
            end = ends[0] + 1 if ends else len(tokens)
            result[row.index] = Rollout(
                prompt_ids=prompt,
                token_ids=tuple(tokens[:end]),
                logps=tuple(logps[place][:end]),
                entropies=tuple(entropies[place][:end]),
                finished=bool(ends),
            )
        return result


class _SeededSampling(LogitsProcessor):
    """Samples each row's token with its own seed and masks all others."""

    def __init__(
        self,
        rows: list[tuple[tuple[int, ...], RolloutRequest]],
        filters: Filters,
        start: int,
        device: Any,
    ) -> None:
        self.prompts = [prompt for prompt, _ in rows]
        self.seeds = torch.tensor([row.seed for _, row in rows], device=device)
        self.filters, self.start = filters, start
        self.logps: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = torch.full_like(self.seeds, input_ids.shape[1] - self.start)
        keys = noise_keys(self.seeds, step)
        seen = self._seen(input_ids, scores) if self.filters.repetition_penalty != 1 else None
        tokens, logps, entropies = draw(scores, keys, self.filters, seen)
        self.logps.append(logps)
        self.entropies.append(entropies)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def _seen(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The tokens of each row so far, without padding."""
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for place, prompt in enumerate(self.prompts):
            seen[place, torch.tensor(prompt, device=seen.device)] = True
        return seen.scatter(1, input_ids[:, self.start :], True)


class _OwnLimits(StoppingCriteria):
    """Ends each row at its own limit."""

    def __init__(
        self, rows: list[tuple[tuple[int, ...], RolloutRequest]], start: int, device: Any
    ) -> None:
        self.lengths = torch.tensor([start + row.limit for _, row in rows], device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.lengths <= input_ids.shape[1]
