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
from asymgrpo.experiment.display import MetricsTail, progress_note, tell
from asymgrpo.experiment.plan import Job, is_done
from asymgrpo.experiment.signals import stopped_by_signals
from asymgrpo.experiment.store import FORMAT, RunStore, read_plan, write_atomically
from asymgrpo.visible import visible

PLAN_FILE = "plan.json"
"""In a comparison's folder: what all of its runs must share that no setting says."""


def finished(job: Job) -> bool:
    """Whether the run of a job has nothing left to do: one of fewer steps is extended."""
    store = RunStore(job.folder)
    return store.exists() and is_done(store.run(), job.settings)


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


def worker_environments(
    jobs: Sequence[Job], missing: int, out: Path, at_once: int | None
) -> list[dict[str, str]]:
    """An environment for each worker: its GPU, if there are any, and its number of threads."""
    gpus = visible_gpus()
    cores = len(os.sched_getaffinity(0))
    most = at_once or (len(gpus) if gpus else cores)
    threads = planned_threads(out, share=max(1, cores // max(1, min(len(jobs), most))))
    count = max(1, min(missing, most))
    shared = {**os.environ, "OMP_NUM_THREADS": threads}
    shared |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if not gpus:
        return [shared] * count
    return [{**shared, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]


def planned_threads(out: Path, share: int) -> str:
    """OMP_NUM_THREADS of every worker of the comparison in `out`, now and when it is restarted.

    Sums depend in their last bits on how many threads make them. So the number is the user's own
    if there is one, else what the comparison began with, else `share`; it is kept in `out`.
    """
    path = out / PLAN_FILE
    kept = read_plan(path).get("threads") if path.is_file() else None
    if kept is not None and (type(kept) is not str or not kept):
        raise UserError(f"{path}: threads is {kept!r:.60}; correct it in the file")
    threads: str = os.environ.get("OMP_NUM_THREADS") or kept or str(share)
    if kept is None:
        record = {"format": FORMAT, "threads": threads}
        write_atomically(path, (json.dumps(record) + "\n").encode())
    return threads


class Worker(threading.Thread):
    """Feeds jobs to one worker process until there are none; a process that dies is replaced."""

    def __init__(
        self, jobs: SimpleQueue[Job], environment: dict[str, str], log: Path, console: Console
    ):
        super().__init__(daemon=True)
        self.jobs, self.environment, self.log, self.console = jobs, environment, log, console
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
        for line in process.stdout:
            answer = json.loads(line)
            if "note" not in answer:
                error: str | None = answer.get("error")
                return error
            tell(self.console, f"{job.folder.name}: {answer['note']}")
        process.wait()
        self.process = None
        return f"the worker process died (exit code {process.returncode}); see {self.log}"

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
    environments = worker_environments(jobs, len(missing), out, at_once)
    workers = [
        Worker(queue, environment, out / f"worker-{number}.log", console)
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
    ended = {job.folder for job in jobs if finished(job)}
    done = sum(job.settings.steps for job in jobs if job.folder in ended)
    tails = {job.folder: MetricsTail(RunStore(job.folder)) for job in jobs}
    row = bar.add_task("", total=total, completed=done, left="")
    started, begun_at = time.monotonic(), done
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while any(worker.is_alive() for worker in workers):
            active = [worker.current for worker in workers if worker.current is not None]
            # A run that was not looked at yet has not begun, and one that has ended stays so.
            begun = {folder for folder, tail in tails.items() if tail.step} - ended
            ended |= {job.folder for job in jobs if job.folder in begun and finished(job)}
            done = sum(job.settings.steps for job in jobs if job.folder in ended)
            lines = []
            for job in active:
                step, seen = tails[job.folder].look()
                done += step if job.folder not in ended else 0
                note = progress_note(seen)
                lines.append(
                    Text(visible(f"  {job.folder.name}  {step}/{job.settings.steps}  {note}"))
                )
            rate = (done - begun_at) / max(time.monotonic() - started, 1e-9)
            left = _duration((total - done) / rate) + " left" if done > begun_at else ""
            bar.update(row, completed=done, left=left)
            live.update(Group(bar, *lines))
            time.sleep(0.5)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
