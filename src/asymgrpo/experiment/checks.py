"""Settings that would fail later, deep inside a library, refused in one line before anything."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from asymgrpo.errors import UserError

LEAST: dict[str, float] = {
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
         "max_grad_norm", "warmup_steps", "dataloader_num_workers", "label_smoothing_factor"),
        0,
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations",
         "steps_per_generation", "generation_batch_size", "max_completion_length",
         "save_total_limit", "ref_model_sync_steps"),
        1,
    ),
    "num_generations": 2,
}  # fmt: skip
"""Numbers of the trainer's, and the smallest that each may be."""

INEXACT = {
    "save_only_model": "leave it out, and save less often (save_steps) or fewer (save_total_limit)",
    "ignore_data_skip": "leave it out",
}
"""Switches of the trainer's that take from a checkpoint what a run needs to go on exactly."""


def check_trainer(trainer: Mapping[str, Any], engine: str) -> None:
    """Refuse numbers out of range, an engine that is not installed, and unknown trackers.

    >>> check_trainer({"learning_rate": -1.0}, "native")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: learning_rate must be at least 0, got -1.0
    """
    for name, least in LEAST.items():
        value = trainer.get(name)
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise UserError(f"{name} must be at least {least:g}, got {value}")
    for name in ("logging_steps", "save_steps"):
        if isinstance(trainer.get(name), int | float) and not trainer[name] > 0:
            raise UserError(f"{name} must be above 0, got {trainer[name]}")
    for name, instead in INEXACT.items():
        if trainer.get(name):
            raise UserError(f"{name}=true makes a run that was cut end otherwise; {instead}")
    wants_vllm = engine == "vllm" or trainer.get("use_vllm")
    if wants_vllm and importlib.util.find_spec("vllm") is None:
        raise UserError("the engine vllm needs vLLM: pip install 'asymgrpo[vllm]'")
    check_trackers(trainer.get("report_to"))


def check_trackers(report_to: Any) -> None:
    """Refuse a tracker that transformers does not know or that is not installed.

    >>> check_trackers("tensorbord")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no tracker 'tensorbord'; did you mean tensorboard?
    """
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            near = get_close_matches(str(name), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {near[0]}?" if near else "none keeps the metrics in the run alone"
            raise UserError(f"no tracker {name!r}; {hint}")
        if name not in get_available_reporting_integrations():  # type: ignore[no-untyped-call]
            raise UserError(
                f"the tracker {name} is not installed: pip install {name}, or --report-to none"
            )


@contextlib.contextmanager
def settings_at_fault() -> Iterator[None]:
    """What a library says of settings while it is set up is the user's to fix, in one line."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"these settings cannot be run: {' '.join(str(error).split())}") from error


def check_weights(model: torch.nn.Module, name: str) -> None:
    """Refuse weights that are NaN or infinite: what they sample, and learn, means nothing.

    >>> check_weights(torch.nn.Linear(1, 1), "a model")
    """
    for key, weight in model.named_parameters():
        # Of a quantised weight, the scales beside it are what can go wrong.
        plain = weight.is_floating_point() and weight.element_size() > 1
        if plain and not bool(weight.detach().isfinite().all()):
            raise UserError(
                f"{name} has weights that are not finite ({key}); take an earlier checkpoint, or "
                "another model"
            )
