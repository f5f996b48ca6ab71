"""Runs an `asymgrpo` command to its end, then again and again under SIGKILL at random moments.

    python killing.py --kills 30 --log kills.log -- train --out runs/{} ...

`{}` is the number of the run. Run 0 is left alone and says how long one takes; each further one is
killed within that time and started again until it is done, until there were so many kills in all.
The libraries are loaded once; every attempt is a process of its own, forked from this one, that
runs the command from its first line. Workers that it starts are left to notice.
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", required=True)
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import asymgrpo.experiment.evaluations
    import asymgrpo.experiment.run  # noqa: F401

    draw = random.Random(arguments.seed)
    runs, kills, longest = 0, 0, 0.0
    while runs == 0 or kills < arguments.kills:
        words = [word.replace("{}", str(runs)) for word in arguments.words]
        while runs > 0 and kills < arguments.kills:
            if not killed(attempt(words, arguments.log), draw.uniform(0, longest)):
                break
            kills += 1
        else:
            started = time.monotonic()
            _, status = os.waitpid(attempt(words, arguments.log), 0)
            if os.waitstatus_to_exitcode(status) != 0:
                sys.exit(f"an attempt ended with {os.waitstatus_to_exitcode(status)}")
            if runs == 0:
                longest = time.monotonic() - started
        runs += 1
    print(json.dumps({"kills": kills, "runs": runs, "longest": longest}))


if __name__ == "__main__":
    main()
