"""Evaluating a model, an adapter or a run from the command line."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from asymgrpo.errors import UserError
from asymgrpo.evaluation import evaluate_policy
from asymgrpo.evaluation.partial import digest
from asymgrpo.experiment.checks import check_weights
from asymgrpo.experiment.display import tell
from asymgrpo.experiment.run import training_sampling, versions
from asymgrpo.experiment.settings import MOST, RunSettings, trainer_defaults
from asymgrpo.experiment.signals import stopped_by_signals
from asymgrpo.experiment.store import RUN_FILE, RunStore, write_atomically
from asymgrpo.models import Policy, load_policy
from asymgrpo.rollout import Sampling, choose_engine
from asymgrpo.rollout.select_engine import ENGINES
from asymgrpo.secrets import redacted
from asymgrpo.tasks import Task, load_task
from asymgrpo.tasks.own import names_a_file
from asymgrpo.tasks.registry import split_options
from asymgrpo.training.task_data import ENDLESS
from asymgrpo.visible import visible

SAMPLES, KS = 64, (1, 2, 4, 8)
"""Default number of completions per problem, and values of k."""
PROBLEMS = 200
"""Default number of problems of a task whose rows have no end."""
FILTERS = ("top_p", "top_k", "min_p")
"""Sampling options that do nothing in greedy decoding."""


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
    """None for all, or for `PROBLEMS` of a task without end."""
    samples: int | None
    ks: Sequence[int] | None
    temperature: float | None
    """0 is greedy decoding."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    stop: Sequence[str] | None
    max_new_tokens: int | None
    seed: int
    cluster: str | None
    engine: str | None
    trust_remote_code: bool
    log_samples: bool


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
    cluster: str | None


def evaluate_model(
    request: Request, out: Path | None, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Measure, showing progress; what is measured already of an earlier try is kept."""
    _check(request)
    store = RunStore(request.model)
    subject = find_subject(request, store)
    task = load_task(subject.task, path=subject.task_path, prompt=subject.prompt)
    rows = task.examples(request.split)
    count = problem_count(task, request, console)
    samples, ks = samples_and_ks(request, subject.sampling)
    policy = load_policy(
        subject.weights,
        device="cuda" if torch.cuda.is_available() else None,
        trust_remote_code=request.trust_remote_code,
    )
    check_weights(policy.model, request.model)
    engine, reason = choose_engine(subject.engine, policy.model, policy.tokenizer)
    if reason:
        tell(console, reason)
    model_key, task_key = weights_key(subject.weights), task_identity(subject.task)
    setting = {
        **asdict(subject), "weights": model_key, "task": task_key, "split": request.split,
        "problems": count, "samples": samples, "k": ks, "seed": request.seed,
    }  # fmt: skip
    path = out or default_path(request.model, store.exists(), task.name, request.split, setting)
    with stopped_by_signals(), Progress(console=console, transient=True) as bar:
        row = bar.add_task(escape(visible(f"{task.name} {request.split}")), total=None)
        result = evaluate_policy(
            engine,
            policy.tokenizer,
            task,
            [rows[index] for index in range(count)],
            samples=samples,
            ks=ks,
            sampling=subject.sampling,
            seed=request.seed,
            split=request.split,
            system_prompt=subject.system_prompt,
            template=subject.template,
            cluster=subject.cluster,
            log=request.log_samples,
            model_key=model_key,
            task_key=task_key,
            on_progress=lambda done, total: bar.update(row, completed=done, total=total),
            partial=path.with_suffix(".partial.jsonl"),
        )
    logged = result.pop("log", None)
    if logged is not None:
        lines = "".join(json.dumps(line) + "\n" for line in logged)
        write_atomically(samples_path(path), lines.encode())
    result = redacted(circumstances(request, subject, policy)) | result
    write_atomically(path, (json.dumps(result) + "\n").encode())
    path.with_suffix(".partial.jsonl").unlink(missing_ok=True)
    return path, result


def samples_path(path: Path) -> Path:
    """Where the samples of the evaluation in `path` are written.

    >>> samples_path(Path("evaluations/tiny.json")).name
    'tiny.samples.jsonl'
    """
    return path.with_suffix(".samples.jsonl")


def circumstances(request: Request, subject: Subject, policy: Policy) -> dict[str, Any]:
    """What an evaluation was made with, beside the task's name and the sampling."""
    parameter = next(policy.model.parameters())
    device = str(parameter.device)
    if parameter.is_cuda:
        device = f"{device} ({torch.cuda.get_device_name(parameter.device)})"
    return {
        "model": request.model,
        "revision": getattr(policy.model.config, "_commit_hash", None),
        "prompt": subject.prompt,
        "system_prompt": subject.system_prompt,
        "task_options": split_options(subject.task)[1],
        "task_path": subject.task_path,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": device,
        "dtype": str(parameter.dtype).removeprefix("torch."),
    }


def problem_count(task: Task, request: Request, console: Console) -> int:
    """How many problems are measured, which is said where it is not all of them."""
    there = len(task.examples(request.split))
    if request.problems is not None:
        return min(request.problems, there)
    if there <= ENDLESS:
        return there
    console.print(
        f"{task.name} has {there:,} rows; the first {PROBLEMS} are measured, "
        "--problems says how many",
        markup=False,
        highlight=False,
    )
    return PROBLEMS


def samples_and_ks(request: Request, sampling: Sampling) -> tuple[int, list[int]]:
    """Completions a problem, one where decoding is greedy, and the values of k that they allow."""
    if sampling.greedy and (request.samples or 1) > 1:
        raise UserError("--temperature 0 has one completion a problem; leave out --samples")
    samples = request.samples or (1 if sampling.greedy else SAMPLES)
    if request.ks is None:
        return samples, [k for k in KS if k <= samples]
    if max(request.ks) > samples:
        raise UserError(f"--k {max(request.ks)} needs at least as many --samples")
    return samples, list(request.ks)


def task_identity(spec: str) -> str:
    """The task with its options, and the file's content where it is in a file of the user's own."""
    bare, _ = split_options(spec)
    if not names_a_file(bare):
        return spec
    code = Path(bare.rpartition(":")[0]).read_bytes()
    return f"{spec} {hashlib.sha256(code).hexdigest()}"


def _check(request: Request) -> None:
    """Refuse before anything is loaded."""
    least = {"samples": 1, "problems": 1, "seed": 0, "max_new_tokens": 1}
    for name, smallest in least.items():
        value = getattr(request, name)
        if value is not None and not smallest <= value <= MOST:
            raise UserError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
    if request.temperature is not None and not 0 <= request.temperature < math.inf:
        raise UserError(
            f"--temperature must be at least 0, which is greedy, got {request.temperature}"
        )
    idle = [name for name in FILTERS if request.temperature == 0 and getattr(request, name)]
    if idle:
        raise UserError(
            f"--{idle[0].replace('_', '-')} does nothing at --temperature 0; leave one of them out"
        )
    if request.engine is not None and request.engine not in ENGINES:
        raise UserError(f"no engine named {request.engine!r}; choose from {', '.join(ENGINES)}")


def find_subject(request: Request, store: RunStore) -> Subject:
    """The request, completed by the run that it names: its task, prompts, sampling and engine."""
    if not store.exists():
        return Subject(
            request.model, request.task or "arithmetic", request.task_path, request.prompt,
            request.system_prompt, None, find_sampling(request, {"max_completion_length": 512}),
            request.engine or "native", request.cluster,
        )  # fmt: skip
    record = store.run()
    known = record.get("settings") or {key: record[key] for key in ("task",) if record.get(key)}
    if request.task is None and "task" not in known:
        raise UserError(f"{store.folder / RUN_FILE} names no task; pass --task")
    settings = RunSettings.from_dict(known)
    trainer = {**trainer_defaults(), **settings.trainer, **(record.get("resolved") or {})}
    same_task = request.task in (None, settings.task)
    own = settings if same_task else RunSettings()  # a prompt and its data belong to a task
    return Subject(
        str(_weights(store)),
        request.task or settings.task,
        request.task_path or own.task_path,
        request.prompt if request.prompt is not None else own.prompt,
        request.system_prompt if request.system_prompt is not None else settings.system_prompt,
        trainer.get("chat_template_kwargs"),
        find_sampling(request, trainer),
        request.engine or settings.engine,
        request.cluster or own.cluster,
    )


def find_sampling(request: Request, trainer: Mapping[str, Any]) -> Sampling:
    """The trainer's sampling with what the request changes; at temperature 0 it is greedy."""
    names = ("temperature", *FILTERS, "repetition_penalty", "stop", "max_new_tokens")
    changes = {name: getattr(request, name) for name in names}
    if request.temperature == 0:
        trainer = {k: v for k, v in trainer.items() if k not in ("temperature", *FILTERS)}
        changes |= {"temperature": None, "greedy": True}
    return training_sampling(trainer, **changes)


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


def default_path(
    model: str, is_run: bool, task: str, split: str, setting: Mapping[str, Any]
) -> Path:
    """In the run's own folder, or under `evaluations/` here; another `setting`, another name."""
    words = re.sub(r"[^A-Za-z0-9.=]+", "-", f"{task}-{split}").strip("-.")
    words = f"{words[-80:]}-{digest(setting)[:8]}".strip("-.")
    if is_run:
        return Path(model) / "evaluations" / f"evaluate-{words}.json"
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", Path(model).name).strip("-.")
    return Path("evaluations") / f"{name}-{words}.json"
