"""Runs an `asymgrpo` command again and again, killing it at random moments, until it is done.

    python killing.py --kills 3 --seed 0 --longest 5 -- train --out runs/a ...

The libraries are loaded once; every attempt is a process of its own, forked from this one, that
runs the command from its first line to its last or to its SIGKILL. Workers that it starts are left
to notice. Prints how many attempts were killed, and where, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback


def attempt(words: list[str], log: str) -> int:
    """Fork a process that runs the command; its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
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


def killed(child: int, delay: float) -> bool:
    """Kill the process after `delay` seconds; whether it was still running."""
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                sys.exit(f"an attempt ended with {code} before it was killed")
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != 0  # it may have ended just then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--longest", type=float, required=True, help="Seconds of an attempt.")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import asymgrpo.experiment.evaluations
    import asymgrpo.experiment.run  # noqa: F401

    draw = random.Random(arguments.seed)
    delays: list[float] = []
    while len(delays) < arguments.kills:
        delay = draw.uniform(0, arguments.longest)
        if not killed(attempt(arguments.words, arguments.log), delay):
            break
        delays.append(delay)
    else:
        _, status = os.waitpid(attempt(arguments.words, arguments.log), 0)
        if os.waitstatus_to_exitcode(status) != 0:
            sys.exit(f"the last attempt ended with {os.waitstatus_to_exitcode(status)}")
    print(json.dumps({"kills": len(delays), "seconds": delays}))


if __name__ == "__main__":
    main()
