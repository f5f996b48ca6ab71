"""Train every combination of types, engines and scorers through the command line; print a table.

    python scripts/gpu_check.py [--model tiny] [--jobs 4] [--only bfloat16-full] [--out FOLDER]

A cell is weights {float32, bfloat16, float16} x {lora, full} x {bf16, fp16, neither} x {native,
transformers} x {packed, padded}: two rollout batches of four mini-batches each, held-out evaluation
before and after, cut by SIGTERM in the middle of a rollout batch, and resumed by the same command.
Each cell trains, with a ratio of exactly 1 in the first mini-batch of every rollout batch, or is
refused by one line. Exits with 1 if any cell does neither.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WEIGHTS = ("float32", "bfloat16", "float16")
STEPS, MINI_BATCHES, CUT_AFTER = 8, 4, 3


@dataclass(frozen=True)
class Cell:
    """One combination."""

    weights: str
    trained: str
    flag: str
    engine: str
    scorer: str

    @property
    def name(self) -> str:
        return "-".join(asdict(self).values())


CELLS = tuple(
    itertools.starmap(
        Cell,
        itertools.product(
            WEIGHTS,
            ("lora", "full"),
            ("bf16", "fp16", "neither"),
            ("native", "transformers"),
            ("packed", "padded"),
        ),
    )
)


def command(cell: Cell, model: Path, out: Path, options: argparse.Namespace) -> list[str]:
    """The arguments of `asymgrpo` for a cell."""
    settings = {
        "bf16": str(cell.flag == "bf16").lower(),
        "fp16": str(cell.flag == "fp16").lower(),
        "per_device_train_batch_size": 16,
        "steps_per_generation": MINI_BATCHES,
        "num_generations": 8,
        "max_completion_length": options.tokens,
        "learning_rate": 1e-6 if cell.trained == "full" else 1e-5,
        "lr_scheduler_type": "constant",
        "save_steps": 100,
        "report_to": "none",
        "eval_problems": 16,
        "eval_samples": 2,
    }
    return [
        *("train", "--model", str(model), "--task", options.task, "--algorithm", "abc-grpo"),
        *("--steps", str(STEPS), "--lora", "8" if cell.trained == "lora" else "0"),
        *("--engine", cell.engine, "--scorer", cell.scorer, "--eval-every", str(STEPS)),
        *("--out", str(out)),
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
    ]


def run_command(arguments: list[str]) -> tuple[int, str]:
    """The exit code of `asymgrpo` with these arguments, and what it printed."""
    from asymgrpo.cli import main

    printed = io.StringIO()
    before, sys.argv = sys.argv, ["asymgrpo", *arguments]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as end:
        return int(end.code or 0), printed.getvalue()
    except BaseException:
        return 1, printed.getvalue() + traceback.format_exc()
    finally:
        sys.argv = before
    return 0, printed.getvalue()


@contextlib.contextmanager
def cut_after(step: int) -> Any:
    """Within, a run gets SIGTERM once it has logged that step."""
    from asymgrpo.experiment.store import RunStore

    append = RunStore.append_metrics

    def appending(self: Any, logged: int, metrics: Any) -> None:
        append(self, logged, metrics)
        if logged == step:
            os.kill(os.getpid(), signal.SIGTERM)

    RunStore.append_metrics = appending
    try:
        yield
    finally:
        RunStore.append_metrics = append


def check(job: tuple[Cell, Path, Path, argparse.Namespace]) -> dict[str, Any]:
    """Train one cell, cut it, go on, and say what came out."""
    cell, model, out, options = job
    started = time.monotonic()
    arguments = command(cell, model, out, options)
    with cut_after(CUT_AFTER):
        code, printed = run_command(arguments)
    found: dict[str, Any] = {"cell": cell.name}
    if code == 2:
        return found | {"result": "refused", "line": printed.strip().splitlines()[-1]}
    cut = json.loads((out / "run.json").read_text())["status"] if code != 1 else "failed"
    if cut != "interrupted":
        return found | {"result": "FAILED", "line": f"not cut, {cut}: {printed[-2000:]}"}
    code, printed = run_command(arguments)
    if code != 0:
        return found | {"result": "FAILED", "line": f"not resumed: {printed[-2000:]}"}
    return found | summary(out) | {"seconds": round(time.monotonic() - started, 1)}


def summary(out: Path) -> dict[str, Any]:
    """What the run's folder says."""
    run = json.loads((out / "run.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(p.read_text()) for p in sorted((out / "evaluations").glob("*.json"))]
    firsts = [line for line in lines if line["step"] % MINI_BATCHES == 1]
    ratios = [line["ratio/max"] for line in firsts]
    complete = len(lines) == STEPS and run["status"] == "finished" and len(evaluations) == 2
    return {
        "result": "trained" if complete and set(ratios) == {1.0} else "FAILED",
        "line": run["precision"],
        "first ratio/max": max(ratios),
        "later ratio/max": max(line["ratio/max"] for line in lines if line not in firsts),
        "logp difference": firsts[-1].get("sampling/logp_difference/mean"),
        "beyond clip": firsts[-1].get("sampling/beyond_clip"),
        "pass@1": [round(e["metrics"]["pass@1"]["value"], 3) for e in evaluations],
        "skipped": sum(line.get("gradient/skipped", 0) for line in lines),
    }


def save_models(spec: str, folder: Path) -> dict[str, Path]:
    """The model in each type, as folders."""
    import torch

    from asymgrpo.models import load_policy

    saved = {}
    policy = load_policy(spec, dtype="float32")
    for name in WEIGHTS:
        saved[name] = folder / name
        policy.model.to(getattr(torch, name)).save_pretrained(saved[name])
        policy.tokenizer.save_pretrained(saved[name])
    return saved


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    if found["result"] != "trained":
        return f"{found['cell']:46} {found['result']:8} {found['line']}"
    difference = found["logp difference"]
    shown = "-" if difference is None else f"{difference:.4f}"
    return (
        f"{found['cell']:46} trained  {found['first ratio/max']:<9} "
        f"{found['later ratio/max']:<9.4f} {shown:>8}  {found['pass@1']}  {found['seconds']} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="arithmetic")
    parser.add_argument("--tokens", type=int, default=32, help="longest completion")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--out", type=Path, help="folder for the runs and table.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        models = save_models(options.model, out / "models")
        chosen = [cell for cell in CELLS if options.only in cell.name]
        jobs = [(cell, models[cell.weights], out / cell.name, options) for cell in chosen]
        found = []
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for done in pool.imap(check, jobs):
                found.append(done)
                print(line(done), flush=True)
        (out / "table.json").write_text(json.dumps(found, indent=1))
    counts = {kind: sum(f["result"] == kind for f in found) for kind in ("trained", "refused")}
    failed = len(found) - sum(counts.values())
    print(f"{counts['trained']} trained, {counts['refused']} refused, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
