"""Kills small runs at random moments, under many sets of options, and compares bit for bit.

    python scripts/kill_runs.py --kills 100
    python scripts/kill_runs.py --kills 20 --processes 2 --sets full,lora,synced-reference

Every set is first run to its end. Then runs of it are cut by SIGKILL, SIGTERM or SIGINT (with
several processes: to one of them or to all) and started again until they are done; weights,
metrics, rollouts and evaluations must be those of the uncut run. Prints a row for each set.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/faults")]

from killing import Attempt, AttemptError, load_libraries  # noqa: E402
from option_sets import OPTION_SETS  # noqa: E402
from runs import small, with_model, words  # noqa: E402

from outcome import outcome  # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""Drawn from; half of the cuts are the hardest."""


@dataclass
class Tally:
    """What became of one set of options."""

    kills: int = 0
    exact: int = 0
    wrong: int = 0
    seconds: float = 0.0


class OptionSet:
    """Runs of one set of options: the uncut one, and those that are killed."""

    def __init__(self, name: str, folder: Path, processes: int):
        self.folder, self.processes = folder / name, processes
        self.folder.mkdir(parents=True)
        changes = with_model(OPTION_SETS[name], self.folder)
        trainer = {"save_steps": 1, **changes.pop("trainer", {})}
        self.settings = small(steps=4, trainer=trainer, **changes)
        self.log, self.runs, self.tally = str(self.folder / "log"), 0, Tally()

    def attempt(self) -> Attempt:
        command = words(self.settings, self.folder / str(self.runs))
        return Attempt(command, self.log, self.processes)

    def run_uncut(self) -> None:
        started = time.monotonic()
        self.attempt().finish()
        self.longest = time.monotonic() - started
        self.expected = outcome(self.folder / "0")

    def kill_one_run(self, draw: random.Random, most: int) -> None:
        """Cut a new run until it ends by itself, or was cut `most` times, and compare."""
        self.runs += 1
        for _ in range(most):
            everybody = range(self.processes)
            victims = draw.choice([*([each] for each in everybody), list(everybody)])
            moment = draw.uniform(0, self.longest)
            if not self.attempt().stop(draw.choice(SIGNALS), moment, victims):
                break
            self.tally.kills += 1
        else:
            self.attempt().finish()
        if same(outcome(self.folder / str(self.runs)), self.expected):
            self.tally.exact += 1
        else:
            self.tally.wrong += 1
            print(f"{self.folder / str(self.runs)} differs from the uncut run", flush=True)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(found[part] == expected[part] for part in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sets", default=",".join(OPTION_SETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    load_libraries()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="kills-"))
    draw = random.Random(arguments.seed)
    names = arguments.sets.split(",")
    tallies: dict[str, Tally] = {}
    for number, name in enumerate(names):
        share = arguments.kills * (number + 1) // len(names) - arguments.kills * number // len(
            names
        )
        each = OptionSet(name, folder, arguments.processes)
        tallies[name], started = each.tally, time.monotonic()
        try:
            each.run_uncut()
            while each.tally.kills < share:
                each.kill_one_run(draw, min(3, share - each.tally.kills))
        except AttemptError as error:
            each.tally.wrong += 1
            print(f"{name}: {error}; see {each.log}", flush=True)
        each.tally.seconds = time.monotonic() - started
        print(row(name, each.tally), flush=True)
    total = Tally(*(sum(getattr(t, field) for t in tallies.values())
                    for field in ("kills", "exact", "wrong", "seconds")))  # fmt: skip
    print(row("all", total))
    sys.exit(1 if total.wrong else 0)


def row(name: str, tally: Tally) -> str:
    return (
        f"{name:20s} {tally.kills:4d} kills  {tally.exact:4d} runs exact  "
        f"{tally.wrong:4d} not exact  {tally.seconds:6.0f} s"
    )


if __name__ == "__main__":
    main()
