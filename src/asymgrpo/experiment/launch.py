"""Running a comparison's jobs, several at a time, under one progress display. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from asymgrpo.errors import Interrupted, UserError
from asymgrpo.experiment.plan import Job
from asymgrpo.experiment.signals import stopped_by_signals
from asymgrpo.experiment.store import RunStore


def finished(job: Job) -> bool:
    """Whether the run of a job has nothing left to do: one of fewer steps is extended."""
    store = RunStore(job.folder)
    if not store.exists():
        return False
    record = store.run()
    return record.get("status") == "finished" and (
        record.get("steps", job.settings.steps) >= job.settings.steps
    )


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index, _ in enumerate(listed.stdout.splitlines())]


def worker_environments(jobs: int, at_once: int | None) -> list[dict[str, str]]:
    """An environment a worker: a GPU each, or an equal share of the cores each."""
    gpus = visible_gpus()
    cores = len(os.sched_getaffinity(0))
    count = max(1, min(jobs, at_once or (len(gpus) if gpus else cores)))
    shared = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // count))}
    shared |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if not gpus:
        return [shared] * count
    return [{**shared, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]


class Worker(threading.Thread):
    """Feeds jobs to one worker process until there are none; a process that dies is replaced."""

    def __init__(self, jobs: SimpleQueue[Job], environment: dict[str, str], log: Path):
        super().__init__(daemon=True)
        self.jobs, self.environment, self.log = jobs, environment, log
        self.process: subprocess.Popen[str] | None = None
        self.current: Job | None = None
        self.errors: list[tuple[Job, str]] = []
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            try:
                self.current = self.jobs.get_nowait()
            except Empty:
                break
            error = self._run_job(self.current)
            if error and not self.stopping:
                self.errors.append((self.current, error))
            self.current = None
        self.stop()

    def _run_job(self, job: Job) -> str | None:
        process = self._ensure_process()
        assert process.stdin is not None
        assert process.stdout is not None
        record = {"settings": job.settings.to_dict(), "folder": str(job.folder)}
        try:
            process.stdin.write(json.dumps(record) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; reading its answer says so
        answer = process.stdout.readline()
        if not answer:
            process.wait()
            self.process = None
            return f"the worker process died (exit code {process.returncode}); see {self.log}"
        error: str | None = json.loads(answer).get("error")
        return error

    def _ensure_process(self) -> subprocess.Popen[str]:
        if self.process is None:
            with open(self.log, "a", encoding="utf-8") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "asymgrpo.experiment.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=self.environment,
                    # Ctrl-C reaches this process alone: a run that it has reached already would
                    # not outlast the signal that tells it to save.
                    start_new_session=True,
                )
        return self.process

    def stop(self) -> None:
        self.stopping = True
        process, self.process = self.process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # with it gone, a run in hand is saved and stops
        process.wait()


def launch(jobs: Sequence[Job], out: Path, console: Console, at_once: int | None = None) -> None:
    """Run what is not finished; raises once all have ended if any failed."""
    missing = [job for job in jobs if not finished(job)]
    if not missing:
        return
    out.mkdir(parents=True, exist_ok=True)
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in missing:
        queue.put(job)
    environments = worker_environments(len(missing), at_once)
    workers = [
        Worker(queue, environment, out / f"worker-{number}.log")
        for number, environment in enumerate(environments)
    ]
    for worker in workers:
        worker.start()
    try:
        with stopped_by_signals():
            _watch(jobs, workers, console)
    except Interrupted:
        console.print("saving the runs in hand")
        for worker in workers:
            worker.stop()
        raise
    errors = [error for worker in workers for error in worker.errors]
    if errors:
        job, message = errors[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UserError(f"{job.folder.name}: {message}{more}")


def _watch(jobs: Sequence[Job], workers: Sequence[Worker], console: Console) -> None:
    """Show all runs until the workers end: steps done, the time left, the reward and entropy."""
    bar = Progress(
        TextColumn("all runs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
    )
    total = sum(job.settings.steps for job in jobs)
    done = sum(job.settings.steps for job in jobs if finished(job))
    row = bar.add_task("", total=total, completed=done, left="")
    started, begun_at = time.monotonic(), done
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while any(worker.is_alive() for worker in workers):
            active = [worker.current for worker in workers if worker.current is not None]
            lines, steps = [], {job.folder: _progress(job) for job in active}
            for job in active:
                step, note = steps[job.folder]
                lines.append(Text(f"  {job.folder.name}  {step}/{job.settings.steps}  {note}"))
            done = sum(job.settings.steps for job in jobs if finished(job))
            done += sum(steps[job.folder][0] for job in active if not finished(job))
            rate = (done - begun_at) / max(time.monotonic() - started, 1e-9)
            left = _duration((total - done) / rate) + " left" if done > begun_at else ""
            bar.update(row, completed=done, left=left)
            live.update(Group(bar, *lines))
            time.sleep(0.5)


def _progress(job: Job) -> tuple[int, str]:
    rows = RunStore(job.folder).metrics()
    seen: dict[str, float] = {}
    for row in rows[-20:]:
        seen |= {key: row[key] for key in ("reward", "entropy") if key in row}
    note = "  ".join(f"{key} {value:.3f}" for key, value in seen.items())
    return (rows[-1]["step"] if rows else 0), note


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
