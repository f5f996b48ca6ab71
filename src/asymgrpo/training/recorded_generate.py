"""Log-probs of what `model.generate` samples, which TRL's own path does not keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from asymgrpo.models.description import causal_model


class TokenRecorder(LogitsProcessor):
    """Stands last among the processors, and so sees the scores that tokens are drawn from."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []
        self._last: Tensor | None = None  # [B, V], whose token is not known yet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids[:, -1:])
        self._last = scores.float().log_softmax(-1)
        return scores

    def _take(self, tokens: Tensor) -> None:
        if self._last is not None:
            self._columns.append(self._last.gather(1, tokens.to(self._last.device)))

    def logps(self, completions: list[list[int]]) -> list[list[float]] | None:
        """Those of each completion's tokens; None where `generate` drew none of them."""
        longest = max(map(len, completions), default=0)
        if self._last is None or len(self._columns) + 1 != longest:
            return None
        # Beam search and assisted decoding draw for other rows than they return.
        if any(len(column) != len(completions) for column in (*self._columns, self._last)):
            return None
        ends = [tokens[-1] if len(tokens) == longest else 0 for tokens in completions]
        self._take(torch.tensor(ends)[:, None])
        rows = torch.cat(self._columns, 1).tolist()
        return [row[: len(tokens)] for row, tokens in zip(rows, completions, strict=True)]


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[TokenRecorder]:
    """Within, `model.generate` records the log-probs of what it draws.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0)
    >>> model = Qwen2ForCausalLM(config)
    >>> with recorded(model) as recorder:
    ...     ids = model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, min_new_tokens=3)
    >>> [len(row) for row in recorder.logps(ids[:, 2:].tolist())]
    [3]
    """
    recorder = TokenRecorder()
    holder: Any = causal_model(model)
    processors = getattr(holder, "_get_logits_processor", None)
    if processors is None:  # not a model of transformers': nothing will be recorded
        yield recorder
        return

    def with_recorder(*args: Any, **kwargs: Any) -> Any:
        # A user's own processors stand before temperature and filters; this one must stand last.
        found = processors(*args, **kwargs)
        found.append(recorder)
        return found

    holder._get_logits_processor = with_recorder
    try:
        yield recorder
    finally:
        del holder._get_logits_processor
