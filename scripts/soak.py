"""A long run of the built-in model, watched from outside: memory, files and threads must not grow.

    python scripts/soak.py --steps 2000

Compares the process at step 200 with the same process at the last step. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SETTINGS = {
    "algorithm": "sa-ah-abc-grpo",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "steps_per_generation": 1,
    "max_completion_length": 16,
    "report_to": "none",
    "save_steps": 100,
    "sample_every": 10,
    "sample_groups": 1,
    "eval_every": 500,
    "eval_problems": 4,
    "eval_samples": 2,
}
FIRST = 200
"""By this step everything that is loaded lazily has been loaded."""
MOST_GROWTH = 0.02


@dataclass(frozen=True)
class Sample:
    """The process at a moment."""

    step: int
    resident: int
    """KiB."""
    threads: int
    files: int


def sample(process: int, metrics: Path) -> Sample | None:
    """The process now; None once it has gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        files = len(list(Path(f"/proc/{process}/fd").iterdir()))
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "VmRSS" not in fields:  # it has ended and is waited for
        return None
    return Sample(step, int(fields["VmRSS"].split()[0]), int(fields["Threads"]), files)


def watch(folder: Path, steps: int) -> tuple[list[Sample], int]:
    """Run to the end; what the process looked like on the way, and its exit code."""
    words = [sys.executable, "-m", "asymgrpo.cli", "train", "--out", str(folder)]
    for key, value in {**SETTINGS, "steps": steps}.items():
        words += ["--set", f"{key}={value}"]
    samples: list[Sample] = []
    with open(folder.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            found = sample(process.pid, folder / "metrics.jsonl")
            if found is not None and (not samples or found.step >= samples[-1].step + 5):
                samples.append(found)
            time.sleep(0.2)
    return samples, process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="soak-"))) / "run"
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    samples, code = watch(folder, arguments.steps)
    if code:
        sys.exit(f"the run ended with {code}; see {folder.with_suffix('.log')}")
    later = [each for each in samples if each.step >= FIRST]
    first, last = later[0], later[-1]
    for each in later[:: max(1, len(later) // 10)]:
        print(f"step {each.step:5d}  {each.resident / 1024:8.1f} MiB  "
              f"{each.threads} threads  {each.files} files")  # fmt: skip
    growth = last.resident / first.resident - 1
    print(f"{arguments.steps} steps in {time.monotonic() - started:.0f} s; steps {first.step} to "
          f"{last.step}: memory {growth:+.2%}, threads {last.threads - first.threads:+d}, "
          f"files {last.files - first.files:+d}")  # fmt: skip
    if growth > MOST_GROWTH or last.threads > first.threads or last.files > first.files:
        sys.exit(1)


if __name__ == "__main__":
    main()
