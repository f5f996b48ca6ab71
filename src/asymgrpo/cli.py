"""The command line: parses and dispatches. Imported by nobody."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asymgrpo.errors import Interrupted, UserError, file_error
from asymgrpo.experiment.display import tell
from asymgrpo.visible import visible, write_any_text

app = typer.Typer(
    help="GRPO-family reinforcement learning that treats a rollout by the sign of its advantage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()

Sets = Annotated[
    list[str] | None, typer.Option("--set", help="key=value: any field of the trainer's.")
]
Config = Annotated[
    str | None, typer.Option("--config", help="A recipe's name, or a recipe or spec in YAML.")
]
Algorithm = Annotated[str | None, typer.Option(help="A name that `asymgrpo algorithms` lists.")]
Model = Annotated[
    str | None, typer.Option(help="tiny, a hub id, a folder, an adapter, a .gguf file.")
]
TaskName = Annotated[str | None, typer.Option("--task", help="A task's name.")]
TaskPath = Annotated[
    str | None, typer.Option(help="The task's data: a JSONL file, or a folder of them.")
]
Prompt = Annotated[
    str | None, typer.Option(help="A template with {question}, in place of the task's own.")
]
SystemPrompt = Annotated[str | None, typer.Option(help="A system message before every prompt.")]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        help="module:function or path/file.py:function, as TRL's; or task for its grader."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Optimiser steps.")]
Lora = Annotated[int | None, typer.Option(help="Rank of a LoRA adapter; 0 trains all weights.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="native, transformers or vllm.")]
Scorer = Annotated[str | None, typer.Option(help="packed or padded.")]
EvalEvery = Annotated[int | None, typer.Option(help="Held-out evaluation every so many steps.")]
Cluster = Annotated[
    str | None,
    typer.Option(help="A column that names the family of a problem; intervals resample families."),
]
ReportTo = Annotated[
    str | None, typer.Option(help="tensorboard, wandb, trackio or none, through transformers.")
]


_AS_TRAINED = "Default: as the run was trained, {} for a model."


@app.command()
def train(
    algorithm: Algorithm = None,
    model: Model = None,
    task: TaskName = None,
    task_path: TaskPath = None,
    prompt: Prompt = None,
    system_prompt: SystemPrompt = None,
    reward: Reward = None,
    steps: Steps = None,
    seed: Annotated[int | None, typer.Option()] = None,
    lora: Lora = None,
    engine: EngineName = None,
    scorer: Scorer = None,
    eval_every: EvalEvery = None,
    cluster: Cluster = None,
    report_to: ReportTo = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/NAME unless said.")
    ] = None,
    config: Config = None,
    assignments: Sets = None,
) -> None:
    """One run."""
    from asymgrpo.experiment.settings import make_settings, parse_assignments

    flags = {
        "algorithm": algorithm, "model": model, "task": task, "task_path": task_path,
        "prompt": prompt, "system_prompt": system_prompt, "reward": reward or None,
        "steps": steps, "seed": seed, "lora": lora, "engine": engine,
        "scorer": scorer, "eval_every": eval_every, "cluster": cluster, "report_to": report_to,
        "out": str(out) if out else None,
    }  # fmt: skip
    _check_algorithm(algorithm)
    recipe = _recipe(config)
    settings, folder = make_settings(recipe, flags, parse_assignments(assignments or []))
    _check_algorithm(settings.algorithm)
    path = Path(folder) if folder else Path("runs") / settings.default_name
    from asymgrpo.experiment.run import train_run

    store = train_run(settings, path, console)
    seconds = store.run().get("seconds", 0.0)
    tell(console, f"wrote {path} ({settings.steps} steps, {seconds:.0f} s)")
    for record in store.evaluations()[-1:]:
        estimate = record["metrics"]["pass@1"]
        console.print(
            f"held-out pass@1 {estimate['value']:.3f} "
            f"[{estimate['low']:.3f}, {estimate['high']:.3f}]",
            highlight=False,
        )
    tell(console, f"next: asymgrpo report {path}   or   asymgrpo inspect {path}")


@app.command()
def compare(
    algorithms: Annotated[str | None, typer.Option(help="Names, by commas.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many seeds, from 0; or numbers by commas.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="field=value,value: also over a field.")
    ] = None,
    model: Model = None,
    task: TaskName = None,
    task_path: TaskPath = None,
    prompt: Prompt = None,
    system_prompt: SystemPrompt = None,
    reward: Reward = None,
    steps: Steps = None,
    lora: Lora = None,
    engine: EngineName = None,
    scorer: Scorer = None,
    eval_every: EvalEvery = None,
    cluster: Cluster = None,
    at_once: Annotated[
        int | None, typer.Option(help="Runs at a time; one a GPU or core unless said.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs.")] = None,
    config: Config = None,
    assignments: Sets = None,
    dry_run: Annotated[bool, typer.Option(help="Print the runs, and do nothing.")] = False,
) -> None:
    """Algorithms x seeds (x any swept field), paired; runs what is missing, ends in a table."""
    from asymgrpo.experiment.plan import parse_seeds, parse_sweeps, plan, split_spec
    from asymgrpo.experiment.settings import parse_assignments

    _check_at_least("--at-once", at_once, 1)
    own, shared = split_spec(_recipe(config))
    flags = {
        "model": model, "task": task, "task_path": task_path, "prompt": prompt,
        "system_prompt": system_prompt, "reward": reward or None,
        "steps": steps, "lora": lora, "engine": engine, "scorer": scorer, "eval_every": eval_every,
        "cluster": cluster,
    }  # fmt: skip
    shared |= {key: value for key, value in flags.items() if value is not None}
    shared |= parse_assignments(assignments or [])
    alone = shared.pop("algorithm", None)  # of a recipe for a single run
    usual = [alone] if alone else ["grpo", "sa-ah-grpo"]
    names = algorithms.split(",") if algorithms else own.get("algorithms", usual)
    for name in names:
        _check_algorithm(name)
    named = [shared.pop(key, None) for key in ("out", "output_dir")]
    folder = Path(out or named[0] or named[1] or "runs/compare")
    shared = {"eval_every": 10, "report_to": "none"} | shared
    jobs = plan(
        names,
        parse_seeds(seeds) if seeds is not None else own.get("seeds", 3),
        parse_sweeps(sweep) if sweep else own.get("sweep", {}),
        shared,
        folder,
    )
    if dry_run:
        rows = [
            {"label": job.label, "seed": str(job.settings.seed), "folder": str(job.folder)}
            for job in jobs
        ]
        for row in rows:
            cells = (row[name].ljust(max(len(r[name]) for r in rows)) for name in row)
            print(visible("  ".join(cells)))
        return
    from asymgrpo.experiment.held_out import regroup
    from asymgrpo.experiment.launch import launch
    from asymgrpo.experiment.store import RunStore

    tell(console, f"{len(jobs)} runs of {jobs[0].settings.steps} steps into {folder}")
    launch(jobs, folder, console, at_once)
    for job in jobs:
        regroup(RunStore(job.folder), job.settings)
    _conclude([job.folder for job in jobs], folder)


def _conclude(folders: list[Path], out: Path) -> None:
    """The table, the verdict and the page of finished runs."""
    from asymgrpo.experiment.compare import compare_runs, load_runs
    from asymgrpo.experiment.comparison import table_rows
    from asymgrpo.experiment.store import write_atomically
    from asymgrpo.report import build_report

    comparison = compare_runs(load_runs(folders))
    _print_rows(table_rows(comparison))
    if comparison.intervals:
        console.print(comparison.intervals, highlight=False, markup=False)
    console.print(comparison.headline, highlight=False, markup=False)
    summary = out / "comparison.json"
    write_atomically(summary, (json.dumps(comparison.to_dict(), indent=2) + "\n").encode())
    page = build_report(folders, out / "report.html")
    tell(console, f"wrote {summary} and {page}")
    tell(
        console,
        f"next: open {page}   or, on a GPU: asymgrpo compare --model Qwen/Qwen2.5-1.5B-Instruct "
        "--task gsm8k --lora 16",
    )


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A model, an adapter, or a run's folder.")],
    task: TaskName = None,
    task_path: TaskPath = None,
    prompt: Prompt = None,
    system_prompt: SystemPrompt = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "test",
    problems: Annotated[
        int | None,
        typer.Option(
            help="The first so many. Default: all, or 200 of a task with more than 100,000 rows, "
            "such as reasoning-gym."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Completions per problem. Default: 64, or 1 at temperature 0."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(help="Comma-separated values of k. Default: those of 1,2,4,8 that fit."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy decoding. " + _AS_TRAINED.format(1.0))
    ] = None,
    top_p: Annotated[float | None, typer.Option(help=_AS_TRAINED.format(1.0))] = None,
    top_k: Annotated[
        int | None, typer.Option(help="0 keeps all tokens. " + _AS_TRAINED.format(0))
    ] = None,
    min_p: Annotated[float | None, typer.Option(help=_AS_TRAINED.format(0.0))] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help=_AS_TRAINED.format(1.0))] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="A string that ends a completion and is not part of it; may be repeated."
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help=_AS_TRAINED.format(512))] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    cluster: Cluster = None,
    engine: Annotated[
        str | None, typer.Option(help="native or transformers. " + _AS_TRAINED.format("native"))
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option()] = False,
    log_samples: Annotated[
        bool,
        typer.Option(
            "--log-samples", help="Also write every prompt and completion, as JSON lines."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The JSON file to write. Default: a name of its own for each setting."),
    ] = None,
) -> None:
    """pass@k, avg@k and maj@k of a model or a run, with intervals; resumes where it stopped."""
    from asymgrpo.experiment.evaluations import Request, evaluate_model, samples_path

    request = Request(
        model=model, task=task, task_path=task_path, prompt=prompt, system_prompt=system_prompt,
        split=split, problems=problems,
        samples=samples, ks=None if k is None else _whole_numbers("--k", k),
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, stop=tuple(stop) if stop else None,
        max_new_tokens=max_new_tokens, seed=seed, cluster=cluster, engine=engine,
        trust_remote_code=trust_remote_code, log_samples=log_samples,
    )  # fmt: skip
    path, record = evaluate_model(request, out, console)
    rows = [
        {"metric": name, "value": f"{v['value']:.4f}", "95 % interval": _interval(v)}
        for name, v in record["metrics"].items()
    ]
    _print_rows(rows)
    if record["grader_failures"]:
        console.print(f"the grader failed on {record['grader_failures']} answers")
    if record["cluster"]:
        families = len({problem["cluster"] for problem in record["problems"]})
        console.print(
            f"intervals over {families} families of problems ({record['cluster']})", highlight=False
        )
    tell(console, f"wrote {path}" + (f" and {samples_path(path)}" if log_samples else ""))


def _interval(estimate: dict[str, Any]) -> str:
    return f"[{estimate['low']:.4f}, {estimate['high']:.4f}]"


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Runs, folders of runs, or TRL's output.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option()] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also figures (SVG, PDF) and tables (CSV, LaTeX, JSON).")
    ] = None,
) -> None:
    """One self-contained page from runs."""
    from asymgrpo.report import build_report

    page = build_report(folders, out, title=title, figures=figures)
    tell(console, f"wrote {page}" + (f" and {figures}" if figures else ""))
    tell(console, f"next: open {page} in a browser")


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="A saved step; the last unless said.")] = None,
    by: Annotated[
        str, typer.Option(help="entropy, discount, ratio, weight, grpo-weight or quadrant.")
    ] = "weight",
    group: Annotated[int | None, typer.Option(help="One prompt's rollouts.")] = None,
    limit: Annotated[int, typer.Option(help="Rollouts at most.")] = 8,
) -> None:
    """Rollouts of a run, token by token."""
    from asymgrpo.experiment.store import RunStore
    from asymgrpo.report import inspect_run

    _check_at_least("--limit", limit, 1)
    store = RunStore(run)
    store.run()
    steps = store.rollout_steps()
    if not steps:
        raise UserError(f"{run} has no saved rollouts; train with --set sample_every=1")
    inspect_run(
        store, steps[-1] if step is None else step, colour_by=by, group=group, limit=limit,
        console=console,
    )  # fmt: skip


@app.command()
def algorithms() -> None:
    """The presets, their pieces and papers."""
    from asymgrpo.objective.presets import ALGORITHMS, differences

    rows = [
        {
            "algorithm": name,
            "arXiv": preset.paper,
            "what it does": preset.summary,
            "pieces unlike GRPO's": differences(preset.config),
        }
        for name, preset in ALGORITHMS.items()
    ]
    _print_rows(rows)
    console.print("next: asymgrpo train --algorithm NAME --set field=value", highlight=False)


def _print_rows(rows: list[dict[str, str]]) -> None:
    """A table; columns that do not fit beside each other follow below, the first one repeated."""
    if not rows:
        return
    first, *others = rows[0]
    widest = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    blocks: list[list[str]] = [[]]
    for name in others:
        used = widest[first] + sum(widest[other] + 2 for other in blocks[-1])
        if blocks[-1] and used + widest[name] + 2 > console.width:
            blocks.append([])
        blocks[-1].append(name)
    for block in blocks:
        table = Table(box=None, pad_edge=False)
        table.add_column(first, no_wrap=True)
        for name in block:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(visible(row[name])) for name in (first, *block)))
        console.print(table, highlight=False)


def _recipe(config: str | None) -> dict[str, Any]:
    from asymgrpo.experiment.settings import load_recipe

    return load_recipe(config) if config else {}


def _check_algorithm(name: str | None) -> None:
    """Refuse an unknown one before the slow imports."""
    if name is None:
        return
    from asymgrpo.objective.presets import algorithm

    try:
        algorithm(name)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{flag} must be at least {least}, got {value}")


def _whole_numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise UserError(f"{flag} takes whole numbers by commas, got {text!r}") from None
    if numbers[0] < 1:
        raise UserError(f"{flag} takes numbers from 1, got {text!r}")
    return numbers


def main() -> None:
    """Run a command; a user's mistake is one line on standard error and exit code 2."""
    # Nothing below needs the hub's progress bars, and they tear the display.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    write_any_text()
    try:
        app()
    except UserError as error:
        print(f"asymgrpo: {visible(str(error))}", file=sys.stderr)
        sys.exit(2)
    except Interrupted:
        print("asymgrpo: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone
        with contextlib.suppress(OSError):
            sys.stdout.close()
        sys.exit(141)
    except OSError as error:
        if error.errno is None:  # not the system's word on a file, so not the user's to mend
            raise
        print(f"asymgrpo: {visible(str(file_error(error)))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
