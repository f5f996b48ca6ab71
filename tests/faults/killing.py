"""Runs an `asymgrpo` command to its end, then again and again under SIGKILL at random moments.

    python killing.py --kills 30 --log kills.log -- train --out runs/{} ...

`{}` is the number of the run. Run 0 is left alone and says how long one takes; each further one is
killed within that time and started again until it is done, until there were so many kills in all.
The libraries are loaded once; every attempt is a process of its own, forked from this one, that
runs the command from its first line, or several that train together. Workers that it starts are
left to notice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from tqdm import tqdm

PATIENCE = 30.0
"""Seconds that a launcher leaves the other processes once one has died."""
LONGEST = 900.0
"""Seconds after which an attempt hangs."""
SAVED = 130
"""What a command that was told to stop exits with."""


class AttemptError(Exception):
    """An attempt that ended otherwise than it should."""


def start(words: Sequence[str], log: str, environment: dict[str, str] | None = None) -> int:
    """Fork a process that runs the command; its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        # Progress bars share a lock between processes, which one that is killed may never release.
        tqdm.set_lock(threading.RLock())
        os.environ.update(environment or {})
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["asymgrpo", *words]
        from asymgrpo.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Attempt:
    """The process of a command, or the processes of one that train together."""

    def __init__(self, words: Sequence[str], log: str, processes: int = 1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        together = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environments = [
            {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            for rank in range(processes)
        ]
        self.running = [start(words, log, each) for each in environments]
        self.codes: list[int] = []

    def look(self) -> None:
        """Notice which processes have ended."""
        for child in list(self.running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self.running.remove(child)
                self.codes.append(os.waitstatus_to_exitcode(status))

    def wait(self, seconds: float) -> bool:
        """Wait for the end, so long at most, as a launcher does; whether it has come."""
        deadline = time.monotonic() + seconds
        ended_at: float | None = None
        while self.running:
            self.look()
            if any(self.codes) and self.running and ended_at is None:
                ended_at = time.monotonic()
                self.send(signal.SIGTERM, self.running)
            if ended_at is not None and time.monotonic() > ended_at + PATIENCE:
                self.send(signal.SIGKILL, self.running)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def send(self, number: signal.Signals, children: Sequence[int]) -> None:
        for child in children:
            os.kill(child, number)  # not waited for yet, so the number is still its own

    def finish(self) -> None:
        """Let it run to its end, which must be a good one."""
        if not self.wait(LONGEST):
            self.send(signal.SIGKILL, self.running)
            raise AttemptError("an attempt hangs")
        if any(self.codes):
            raise AttemptError(f"an attempt ended with {self.codes}")

    def stop(self, number: signal.Signals, delay: float, victims: Sequence[int]) -> bool:
        """Send the signal to some processes after `delay` seconds; whether it cut the run short."""
        if self.wait(delay):
            if any(self.codes):
                raise AttemptError(f"an attempt ended with {self.codes} before it was stopped")
            return False
        self.send(number, [self.running[i] for i in victims if i < len(self.running)])
        if not self.wait(LONGEST):
            self.send(signal.SIGKILL, self.running)
            raise AttemptError(f"an attempt hangs after {number.name}")
        return any(self.codes)  # it may have ended just then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", required=True)
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    load_libraries()
    draw = random.Random(arguments.seed)
    runs, kills, longest = 0, 0, 0.0
    while runs == 0 or kills < arguments.kills:
        words = [word.replace("{}", str(runs)) for word in arguments.words]
        while runs > 0 and kills < arguments.kills:
            attempt = Attempt(words, arguments.log)
            if not attempt.stop(signal.SIGKILL, draw.uniform(0, longest), [0]):
                break
            kills += 1
        else:
            started = time.monotonic()
            Attempt(words, arguments.log).finish()
            if runs == 0:
                longest = time.monotonic() - started
        runs += 1
    print(json.dumps({"kills": kills, "runs": runs, "longest": longest}))


def load_libraries() -> None:
    """So that every attempt has them already."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import asymgrpo.experiment.evaluations
    import asymgrpo.experiment.run  # noqa: F401


if __name__ == "__main__":
    main()
