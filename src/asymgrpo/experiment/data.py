"""Whether prompts fit the model, and reward functions by name."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset

from asymgrpo.errors import UserError
from asymgrpo.experiment.deadline import DeadlineError, call_within
from asymgrpo.tasks import Task, load_object
from asymgrpo.tasks.own import names_a_file
from asymgrpo.training.task_data import RewardFunction, task_reward


def check_lengths(data: Dataset, tokenizer: Any, context: int | None, completion: int) -> None:
    """Refuse prompts that leave a completion no room in the model's context."""
    if context is None:
        return
    room = context - completion
    if room < 1:
        raise UserError(
            f"max_completion_length {completion} leaves no room for a prompt in the model's "
            f"context of {context}; lower it"
        )
    too_long = [
        row
        for row, prompt in zip(data["row"], data["prompt"], strict=True)
        if _most_tokens(prompt) > room and _tokens(prompt, tokenizer) > room
    ]
    if too_long:
        raise UserError(
            f"{len(too_long)} prompts (the first: train row {too_long[0] + 1}) are longer than the "
            f"{room} tokens that the context of {context} leaves beside max_completion_length "
            f"{completion}; remove them, or lower max_completion_length"
        )


def _most_tokens(prompt: Any) -> int:
    """No fewer than the prompt's tokens: its bytes, and what a tokenizer or a template adds."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + 16
    return sum(len(str(turn["content"]).encode()) for turn in prompt) + 1024


def _tokens(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return len(encoded["input_ids"])


def load_reward(name: str, task: Task, timeout: float) -> RewardFunction:
    """`task`, or the function that `module:function` or `path/file.py:function` names."""
    if name == "task":
        return task_reward(task)
    found = load_object(name) if names_a_file(name) else _imported(name)
    if not callable(found):
        raise UserError(f"--reward {name}: it is not a function")
    return checked_reward(name, found, timeout)


def _imported(name: str) -> Any:
    """What `module:function` names."""
    module, separator, function = name.partition(":")
    if not separator:
        raise UserError(
            f"--reward takes module:function, path/file.py:function or task, got {name!r}"
        )
    if os.getcwd() not in sys.path:  # a function in the user's own folder, as python -m finds it
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise UserError(f"--reward {name}: {module} cannot be imported ({error})") from None
    except AttributeError:
        raise UserError(f"--reward {name}: {module} has no function {function!r}") from None


def checked_reward(name: str, function: RewardFunction, timeout: float) -> RewardFunction:
    """The same function, whose mistakes are told in a line that names it; async stays async."""

    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        with _mistakes_named(name, timeout):
            values = list(call_within(timeout, lambda: function(*args, **kwargs)))
        return _checked_values(name, values, kwargs)

    async def checked_async(*args: Any, **kwargs: Any) -> list[float | None]:
        with _mistakes_named(name, timeout):
            found: Any = function(*args, **kwargs)
            values = list(await asyncio.wait_for(found, timeout))
        return _checked_values(name, values, kwargs)

    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    chosen: Any = checked_async if is_async else checked
    chosen.__name__ = getattr(function, "__name__", name.replace(":", "_"))
    wrapped: RewardFunction = chosen
    return wrapped


def _checked_values(
    name: str, values: list[float | None], kwargs: Mapping[str, Any]
) -> list[float | None]:
    expected = len(kwargs.get("completions", values))
    if len(values) != expected:
        raise UserError(
            f"the reward function {name} returned {len(values)} rewards for {expected} "
            "completions; return one for each"
        )
    for value in values:
        if value is not None and not _is_finite(value):
            raise UserError(
                f"the reward function {name} returned {value!r:.60}; return a finite number, "
                "or None for a completion that cannot be scored"
            )
    return values


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


@contextlib.contextmanager
def _mistakes_named(name: str, timeout: float) -> Iterator[None]:
    """Within, a function that raises or does not return ends the run in one line."""
    try:
        yield
    except (DeadlineError, TimeoutError) as error:
        if isinstance(error, DeadlineError) or not str(error):  # asyncio's says nothing
            raise UserError(
                f"the reward function {name} has not returned after {timeout:g} s; make it faster, "
                "or set reward_timeout"
            ) from error
        raise UserError(f"the reward function {name} raised TimeoutError: {error}") from error
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"the reward function {name} raised {cause}") from error
