"""Evaluating a model, an adapter or a run from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from asymgrpo.errors import UserError
from asymgrpo.evaluation import evaluate_policy
from asymgrpo.experiment.signals import stopped_by_signals
from asymgrpo.experiment.store import RunStore, write_atomically
from asymgrpo.models import load_policy
from asymgrpo.rollout import Sampling, choose_engine
from asymgrpo.tasks import load_task


@dataclass(frozen=True)
class Request:
    """What to measure."""

    model: str
    """A model as `--model` takes it, or a run's folder."""
    task: str | None
    """None takes the run's own, or the built-in one."""
    task_path: str | None
    split: str
    problems: int | None
    samples: int
    ks: Sequence[int]
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    engine: str
    trust_remote_code: bool


def evaluate_model(
    request: Request, out: Path | None, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Measure, showing progress; what is measured already of an earlier try is kept."""
    if max(request.ks) > request.samples:
        raise UserError(f"--k {max(request.ks)} needs at least as many --samples")
    spec, task_name, task_path = request.model, request.task, request.task_path
    store = RunStore(request.model)
    if store.exists():
        record = store.run()
        spec = str(_weights(store))
        task_name = task_name or record["task"]
        if task_name == record["task"]:
            task_path = task_path or record.get("settings", {}).get("task_path")
    task = load_task(task_name or "arithmetic", path=task_path)
    policy = load_policy(spec, trust_remote_code=request.trust_remote_code)
    engine, reason = choose_engine(request.engine, policy.model, policy.tokenizer)
    if reason:
        console.print(reason)
    rows = task.examples(request.split)
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
            sampling=Sampling(
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
            ),
            seed=request.seed,
            split=request.split,
            model_key=weights_key(spec),
            on_progress=lambda done, total: bar.update(row, completed=done, total=total),
            partial=path.with_suffix(".partial.jsonl"),
        )
    result = {"model": request.model, **result}
    write_atomically(path, (json.dumps(result) + "\n").encode())
    path.with_suffix(".partial.jsonl").unlink(missing_ok=True)
    return path, result


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
