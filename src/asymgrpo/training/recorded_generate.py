"""Log-probs of what `model.generate` samples, which TRL's own path does not keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList


class TokenRecorder(LogitsProcessor):
    """Stands last among the processors, and so sees the scores that tokens are drawn from."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []
        self._waiting: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.observe(input_ids)
        self._waiting = scores.float().log_softmax(-1)  # [B, V]
        return scores

    def observe(self, ids: Tensor) -> None:
        """Note the log-prob of the last token of `ids` [B, L], which was drawn since the call."""
        if self._waiting is not None:
            self._columns.append(self._waiting.gather(1, ids[:, -1:]))
            self._waiting = None

    def logps(self, completions: list[list[int]]) -> list[list[float]] | None:
        """Those of each completion, in order; None where nothing was recorded."""
        longest = max(map(len, completions), default=0)
        if len(self._columns) < longest or not self._columns:
            return None
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
    holder: Any = model
    generate = holder.generate
    own = "generate" in vars(model)

    def recording(*args: Any, **kwargs: Any) -> Any:
        others = kwargs.pop("logits_processor", None) or []
        processors = LogitsProcessorList([*others, recorder])
        output = generate(*args, logits_processor=processors, **kwargs)
        recorder.observe(output if isinstance(output, Tensor) else output.sequences)
        return output

    holder.generate = recording
    try:
        yield recorder
    finally:
        if own:
            holder.generate = generate
        else:
            del holder.generate
