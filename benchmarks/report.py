"""How long the page takes and how large it is: a long run, and many runs.

    python benchmarks/report.py

Simulates the runs, then reports them; prints seconds and megabytes, and each as a share of its
limit (20 seconds for 5,000 steps, 8 MB for 20 runs of 200 steps) last.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))

from synthetic import write_runs

from asymgrpo.report import build_report

SECONDS_LIMIT = 20.0
MEGABYTES_LIMIT = 8.0


def measure(folder: Path) -> tuple[float, float]:
    """Seconds to report the runs in `folder`, and the page's megabytes."""
    started = time.perf_counter()
    page = build_report([folder], folder.parent / f"{folder.name}.html")
    return time.perf_counter() - started, page.stat().st_size / 1e6


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_runs(root / "long", ("sa-ah-grpo",), seeds=1, steps=5000, save_every=20)
        algorithms = ("grpo", "ah-grpo", "sa-ah-grpo", "abc-grpo")
        write_runs(root / "many", algorithms, seeds=5, steps=200, save_every=10)
        long_seconds, long_size = measure(root / "long")
        print(f"1 run of 5,000 steps    {long_seconds:6.1f} s  {long_size:5.2f} MB")
        many_seconds, many_size = measure(root / "many")
        print(f"20 runs of 200 steps    {many_seconds:6.1f} s  {many_size:5.2f} MB")
        print(f"seconds of the limit    {long_seconds / SECONDS_LIMIT:6.2f}")
        print(f"size of the limit       {many_size / MEGABYTES_LIMIT:6.2f}")


if __name__ == "__main__":
    main()
