"""Evaluating a model, an adapter or a run from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from asymgrpo.errors import UserError
from asymgrpo.evaluation import evaluate_policy
from asymgrpo.experiment.run import training_sampling
from asymgrpo.experiment.settings import MOST, RunSettings, trainer_defaults
from asymgrpo.experiment.signals import stopped_by_signals
from asymgrpo.experiment.store import RunStore, write_atomically
from asymgrpo.models import load_policy
from asymgrpo.rollout import Sampling, choose_engine
from asymgrpo.rollout.select_engine import ENGINES
from asymgrpo.tasks import load_task


@dataclass(frozen=True)
class Request:
    """What to measure. None takes what the run was trained with, or the default for a model."""

    model: str
    """A model as `--model` takes it, or a run's folder."""
    task: str | None
    task_path: str | None
    prompt: str | None
    system_prompt: str | None
    split: str
    problems: int | None
    """None for all."""
    samples: int
    ks: Sequence[int]
    temperature: float | None
    top_p: float | None
    max_new_tokens: int | None
    seed: int
    engine: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class Subject:
    """What is measured, with whatever the request left to the run."""

    weights: str
    task: str
    task_path: str | None
    prompt: str | None
    system_prompt: str | None
    template: Mapping[str, Any] | None
    """Options of the chat template."""
    sampling: Sampling
    engine: str


def evaluate_model(
    request: Request, out: Path | None, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Measure, showing progress; what is measured already of an earlier try is kept."""
    _check(request)
    store = RunStore(request.model)
    subject = find_subject(request, store)
    task = load_task(subject.task, path=subject.task_path, prompt=subject.prompt)
    rows = task.examples(request.split)
    policy = load_policy(subject.weights, trust_remote_code=request.trust_remote_code)
    engine, reason = choose_engine(subject.engine, policy.model, policy.tokenizer)
    if reason:
        console.print(reason, markup=False)
    count = len(rows) if request.problems is None else min(request.problems, len(rows))
    path = out or default_path(request.model, store.exists(), task.name, request.split)
    with stopped_by_signals(), Progress(console=console, transient=True) as bar:
        row = bar.add_task(f"{task.name} {request.split}", total=None)
        result = evaluate_policy(
            engine,
            policy.tokenizer,
            task,
            [rows[index] for index in range(count)],
            samples=request.samples,
            ks=list(request.ks),
            sampling=subject.sampling,
            seed=request.seed,
            split=request.split,
            system_prompt=subject.system_prompt,
            template=subject.template,
            model_key=weights_key(subject.weights),
            on_progress=lambda done, total: bar.update(row, completed=done, total=total),
            partial=path.with_suffix(".partial.jsonl"),
        )
    asked = {"prompt": subject.prompt, "system_prompt": subject.system_prompt}
    result = {"model": request.model, **asked, **result}
    write_atomically(path, (json.dumps(result) + "\n").encode())
    path.with_suffix(".partial.jsonl").unlink(missing_ok=True)
    return path, result


def _check(request: Request) -> None:
    """Refuse before anything is loaded."""
    least = {"samples": 1, "problems": 1, "seed": 0, "max_new_tokens": 1}
    for name, smallest in least.items():
        value = getattr(request, name)
        if value is not None and not smallest <= value <= MOST:
            raise UserError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
    if max(request.ks) > request.samples:
        raise UserError(f"--k {max(request.ks)} needs at least as many --samples")
    if request.engine is not None and request.engine not in ENGINES:
        raise UserError(f"no engine named {request.engine!r}; choose from {', '.join(ENGINES)}")


def find_subject(request: Request, store: RunStore) -> Subject:
    """The request, completed by the run that it names: its task, prompts, sampling and engine."""
    changes = {"temperature": request.temperature, "top_p": request.top_p}
    changes |= {"max_new_tokens": request.max_new_tokens}
    if not store.exists():
        sampling = training_sampling({"max_completion_length": 512}, **changes)
        return Subject(
            request.model, request.task or "arithmetic", request.task_path, request.prompt,
            request.system_prompt, None, sampling, request.engine or "native",
        )  # fmt: skip
    record = store.run()
    settings = RunSettings.from_dict(record.get("settings") or {"task": record["task"]})
    trainer = {**trainer_defaults(), **settings.trainer, **record.get("resolved", {})}
    same_task = request.task in (None, settings.task)
    own = settings if same_task else RunSettings()  # a prompt and its data belong to a task
    return Subject(
        str(_weights(store)),
        request.task or settings.task,
        request.task_path or own.task_path,
        request.prompt if request.prompt is not None else own.prompt,
        request.system_prompt if request.system_prompt is not None else settings.system_prompt,
        trainer.get("chat_template_kwargs"),
        training_sampling(trainer, **changes),
        request.engine or settings.engine,
    )


def weights_key(spec: str) -> str:
    """Names the weights behind `spec`: what is measured of others must not be mixed in.

    >>> weights_key("Qwen/Qwen3-4B-Base")
    'Qwen/Qwen3-4B-Base'
    """
    path = Path(spec)
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    stamps = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files]
    return " ".join([spec, *stamps])


def _weights(store: RunStore) -> Path:
    final = store.folder / "final"
    if not final.is_dir():
        raise UserError(f"{store.folder} is not finished: it has no final weights yet")
    return final


def default_path(model: str, is_run: bool, task: str, split: str) -> Path:
    """In the run's own folder, or under `evaluations/` here."""
    words = re.sub(r"[^A-Za-z0-9.=]+", "-", f"{task}-{split}").strip("-.")
    if is_run:
        return Path(model) / "evaluations" / f"evaluate-{words}.json"
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", Path(model).name).strip("-.")
    return Path("evaluations") / f"{name}-{words}.json"
