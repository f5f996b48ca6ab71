"""A task as the trainer takes it: data sets of prompts, and its grader as a reward function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset

from asymgrpo.errors import UserError
from asymgrpo.tasks import FailureGuard, Task, grade_many, load_task, render_prompt
from asymgrpo.tasks.own import MEMBERS

ENDLESS = 100_000
"""A task of more rows than this is generated on demand: each seed reads a stretch of its own."""
EVALUATED = 200
"""Test rows of such a task that are evaluated on."""

RewardFunction = Callable[..., Sequence[float | None]]


def find_task(task: Task | str) -> Task:
    """The task that a name or `path/file.py:Class` stands for, or the object itself.

    >>> find_task("arithmetic").name
    'arithmetic'
    >>> find_task(7)
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: task is a name, path/file.py:Class or an object with name, \
examples, prompt, grade; got int
    """
    if isinstance(task, str):
        return load_task(task)
    if inspect.isclass(task):
        raise UserError(f"task is a class; make one: task={task.__name__}()")
    if any(not hasattr(task, member) for member in MEMBERS):
        raise UserError(
            f"task is a name, path/file.py:Class or an object with {', '.join(MEMBERS)}; "
            f"got {type(task).__name__}"
        )
    return task


def add_task(given: Task | str, arguments: dict[str, Any], config: Any) -> None:
    """Complete a trainer's `arguments` by what a task gives: data, and a reward unless one is said.

    `arguments` has the tokenizer under `processing_class`.
    """
    for name in ("train_dataset", "eval_dataset"):
        if arguments.get(name) is not None:
            raise UserError(f"task and {name} both give rows; leave one of them out")
    task = find_task(given)
    if len(task.examples("train")) > ENDLESS and config.max_steps < 1:
        raise UserError(f"the task {task.name} makes its rows on demand; set max_steps")
    rows = training_rows(task, prompts_needed(config) if config.max_steps > 0 else 0, config.seed)
    check_rows(task.name, len(rows), config)
    tokenizer = arguments["processing_class"]
    arguments["train_dataset"] = training_set(task, rows, tokenizer)
    arguments["eval_dataset"] = evaluation_set(task, tokenizer, str(config.eval_strategy))
    if not arguments.get("reward_funcs"):
        arguments["reward_funcs"] = [task_reward(task)]


def evaluation_set(task: Task, tokenizer: Any, strategy: str) -> Dataset | None:
    """The test rows; None for a task that has none, where no evaluation is asked for."""
    try:
        there = len(task.examples("test"))
    except UserError:
        if strategy.rpartition(".")[2].lower() != "no":
            raise
        return None
    count = there if there <= ENDLESS else EVALUATED
    return training_set(task, range(count), tokenizer, split="test") if count else None


def prompts_needed(config: Any) -> int:
    """Prompts that a run of `max_steps` steps reads."""
    micro_steps = config.max_steps * config.gradient_accumulation_steps
    batches = math.ceil(micro_steps / (config.steps_per_generation * config.num_iterations))
    prompts: int = config.generation_batch_size // config.num_generations
    return int(batches * prompts)


def check_rows(task: str, rows: int, config: Any) -> None:
    """Refuse fewer rows than a rollout batch has prompts: the trainer would not make one step."""
    group = config.num_generations
    prompts = config.generation_batch_size // group
    if not 0 < rows < prompts:
        return
    a_device = config.generation_batch_size // config.per_device_train_batch_size
    fitting = [n for n in range(1, rows * group // a_device + 1) if n * a_device % group == 0]
    less = f"--set per_device_train_batch_size={fitting[-1]}" if fitting else "steps_per_generation"
    raise UserError(
        f"the task {task} has {rows} training rows, but a rollout batch takes {prompts} prompts; "
        f"add rows, or lower the batch: {less}"
    )


def training_rows(task: Task, needed: int, seed: int) -> range:
    """Which rows of the training split a run reads.

    All of a finite set, which the trainer shuffles by the seed; of an endless one the `seed`-th
    stretch of as many as are `needed`, so that runs of one seed see the same prompts.
    """
    rows = len(task.examples("train"))
    if rows <= ENDLESS:
        return range(rows)
    needed = min(needed, rows)
    start = (seed * needed) % max(rows - needed, 1)
    return range(start, start + needed)


def training_set(
    task: Task,
    rows: range,
    tokenizer: Any,
    system_prompt: str | None = None,
    split: str = "train",
) -> Dataset:
    """Prompts with their row numbers, and the source's simple columns for reward functions."""
    examples = task.examples(split)
    chosen = [examples[row] for row in rows]
    if not chosen:
        raise UserError(f"the task {task.name} has no {split} rows")
    columns: dict[str, list[Any]] = {
        "prompt": [render_prompt(task, example, tokenizer, system_prompt) for example in chosen],
        "row": list(rows),
    }
    if split != "train":
        columns["task_split"] = [split] * len(chosen)
    for key in chosen[0]:
        values = [example.get(key) for example in chosen]
        kinds = {type(value) for value in values}
        if key not in columns and len(kinds) == 1 and kinds <= {str, int, float, bool}:
            columns[key] = values
    return Dataset.from_dict(columns)


def task_reward(task: Task) -> RewardFunction:
    """The task's grader as a reward function; an answer that it fails on has no reward."""
    guard = FailureGuard()

    def correct(
        completions: Sequence[Any], row: Sequence[int], **kwargs: Any
    ) -> list[float | None]:
        texts = [text_of(completion) for completion in completions]
        examples = task.examples(kwargs.get("task_split", ["train"])[0])
        grades = grade_many(task, texts, [examples[index] for index in row])
        for grade in grades:
            guard.count(grade)
        log_metric = kwargs.get("log_metric")
        if log_metric is not None:
            log_metric("grader/failed", sum(grade.failed for grade in grades) / len(grades))
        return [None if grade.failed else grade.score for grade in grades]

    return correct


def text_of(completion: Any) -> str:
    """A completion's text, of a chat or not."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
