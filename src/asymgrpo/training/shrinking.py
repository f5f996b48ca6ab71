"""Sampling that goes on with fewer rollouts at once after running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asymgrpo.rollout.records import Engine, Rollout, Sampling


def halved(tried: int, where: str, unit: str, say: Callable[[str], None]) -> int:
    """Half of what did not fit in memory, said in one line; raises where there is nothing to halve.

    >>> halved(9, "rollout", "rollouts", print)
    out of memory in the rollout; going on with 4 rollouts at a time
    4
    """
    if tried <= 1:
        raise torch.OutOfMemoryError("out of memory on a single rollout")
    say(f"out of memory in the {where}; going on with {tried // 2} {unit} at a time")
    return tried // 2


class ShrinkingEngine:
    """An engine whose `most_rows` is halved when it runs out of memory; the rollouts are the same.

    The tokens of a rollout depend on its prompt and its seed alone, not on its neighbours.
    """

    def __init__(self, engine: Engine, say: Callable[[str], None]) -> None:
        self.engine: Any = engine
        self.name: str = engine.name
        self._say = say

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Rollout]:
        while True:
            try:
                rollouts: list[Rollout] = self.engine.generate(
                    prompts, sampling, seeds, on_progress
                )
                return rollouts
            except torch.OutOfMemoryError:
                self._halve(len(prompts))

    def release(self) -> None:
        """Frees what the engine keeps on a GPU between calls."""
        release = getattr(self.engine, "release", None)
        if release is not None:
            release()

    def _halve(self, rows: int) -> None:
        tried = min(self.engine.most_rows, rows)
        self.engine.most_rows = halved(tried, "rollout", "rollouts", self._say)
        self.release()
        torch.cuda.empty_cache()
