"""What happens beside the training: the run's record, held-out evaluation, the progress bar."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback

from asymgrpo.experiment.display import SHOWN, progress_note
from asymgrpo.experiment.store import RunStore
from asymgrpo.visible import visible

Evaluate = Callable[[int], dict[str, Any]]

KEPT_LOGS = 100


class Recorder(TrainerCallback):
    """Appends a line of metrics for every logged training step."""

    def __init__(self, store: RunStore):
        self.store = store

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The trainer keeps every line in memory and in every checkpoint; the store has them all.
        del state.log_history[:-KEPT_LOGS]
        if not state.is_world_process_zero or "loss" not in logs:
            return
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float)}
        finite = {k: v for k, v in numbers.items() if math.isfinite(v)}
        self.store.append_metrics(state.global_step, finite)


class HeldOut(TrainerCallback):
    """Evaluates before the first step, every so many steps, and after the last one."""

    def __init__(self, store: RunStore, evaluate: Evaluate, every: int):
        self.store, self.evaluate, self.every = store, evaluate, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # a resumed run has its first evaluation
            self._measure(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state)

    def _measure(self, state: Any) -> None:
        step = state.global_step
        if not state.is_world_process_zero or step in self.store.evaluation_steps():
            return
        # Sampling here must not move the random states that training goes on with.
        with torch.random.fork_rng():
            record = self.evaluate(step)
        self.store.write_evaluation(step, record)


class ConstantReward(TrainerCallback):
    """Warns once when every rollout has had the same reward for long: nothing is learnt then."""

    between_steps = ("batches", "warned")

    def __init__(self, patience: int = 20):
        self.patience, self.batches, self.warned = patience, 0, False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward_std" not in logs:
            return
        self.batches = self.batches + 1 if logs["reward_std"] == 0 else 0
        if self.batches >= self.patience and not self.warned:
            self.warned = True
            warnings.warn(
                f"the reward has been {logs['reward']:g} for every rollout of {self.batches} "
                "batches, so nothing is learnt; check the reward function and the task",
                stacklevel=2,
            )


class ProgressBar(TrainerCallback):
    """Steps, the time left, the reward and the entropy."""

    def __init__(self, label: str, console: Console):
        self.label = visible(label)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.seen: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.start()
        self.row = self.bar.add_task(
            self.label, total=state.max_steps, completed=state.global_step, note=""
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen |= {key: logs[key] for key in SHOWN if key in logs}
        note = progress_note(self.seen)
        self.bar.update(self.row, completed=state.global_step, note=note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.row, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.stop()
