"""The input and output records of sampling engines; torch-free types."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    >>> Sampling(temperature=0.7, max_new_tokens=64).greedy
    False
    """

    max_new_tokens: int = 256
    """Tokens at most in a completion, the stop token included."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    """Take the most likely token; temperature and the filters are then not used."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, found in its text without special tokens."""

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be above 0 (use greedy=True for the limit)": (
                0 < self.temperature < math.inf
            ),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (off) or positive": self.top_k >= 0,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": 0 < self.repetition_penalty < math.inf,
            "stop strings must not be empty": all(self.stop),
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(message)


@dataclass(frozen=True)
class Rollout:
    """One sampled completion, token by token."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The completion, the stop token or string included when one was drawn."""
    logps: tuple[float, ...] | None
    """Log-prob of each token under the distribution it was drawn from, or None if unknown."""
    entropies: tuple[float, ...] | None
    """Entropy in nats of the temperature-scaled distribution at each token, or None if unknown."""
    finished: bool
    """Whether a stop token or string ended it, rather than the length limit."""


class Engine(Protocol):
    """Samples completions; all that the trainer and the evaluation know of an engine."""

    name: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Rollout]:
        """One rollout per prompt, in order; equal neighbouring prompts form a group.

        `seeds` has one entry per rollout: the tokens of a rollout depend on its prompt and its seed
        alone. `on_progress(done, total)` is called as rollouts finish.
        """
        ...
