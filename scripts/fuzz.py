"""Feeds generated inputs to every reader of foreign text; fails on the first that breaks one.

python scripts/fuzz.py --inputs 100000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fuzz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--only", help="One target's name.")
    arguments = parser.parse_args()
    from fuzzing import TARGETS, feed
    from hypothesis import HealthCheck, Phase, given, settings

    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    started = time.monotonic()
    for name, target in TARGETS.items():
        if arguments.only not in (None, name):
            continue
        wanted = arguments.inputs * target.share // 100

        def read(value: Any) -> None:
            counts[name] += 1  # noqa: B023  # called within this turn of the loop
            refused[name] += feed(target, value)  # noqa: B023

        check = given(target.inputs)(read)
        begun = time.monotonic()
        # Several rounds: a strategy may run out of new inputs before its count is reached.
        while counts[name] < wanted:
            settings(
                max_examples=min(10_000, wanted - counts[name]),
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )(check)()
        print(
            f"{name:17} {counts[name]:7d} inputs, {refused[name]:7d} refused, "
            f"{time.monotonic() - begun:6.1f} s",
            flush=True,
        )
    print(f"{counts.total()} inputs, no crash, hang or uncaught exception, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
