"""Feeds generated inputs to every reader of foreign text; fails on the first that breaks one.

python scripts/fuzz.py --inputs 100000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fuzz"))


def fuzz(target: Any, wanted: int) -> tuple[int, int]:
    """Feed `wanted` inputs; how many were fed, and how many were refused."""
    from fuzzing import feed
    from hypothesis import HealthCheck, Phase, given, settings

    fed = refused = 0
    # Several rounds: a strategy may run out of new inputs before its count is reached.
    while fed < wanted:

        @settings(
            max_examples=min(10_000, wanted - fed),
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def check(value: Any) -> None:
            nonlocal fed, refused
            fed += 1
            refused += feed(target, value)

        check()
    return fed, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--only", help="Targets by commas; all unless said.")
    arguments = parser.parse_args()
    from fuzzing import TARGETS

    started, total = time.monotonic(), 0
    for name in arguments.only.split(",") if arguments.only else TARGETS:
        begun = time.monotonic()
        fed, refused = fuzz(TARGETS[name], arguments.inputs * TARGETS[name].share // 100)
        total += fed
        seconds = time.monotonic() - begun
        print(f"{name:17} {fed:7d} inputs, {refused:7d} refused, {seconds:6.1f} s", flush=True)
    seconds = time.monotonic() - started
    print(f"{total} inputs, no crash, hang or uncaught exception, {seconds:.0f} s")


if __name__ == "__main__":
    main()
