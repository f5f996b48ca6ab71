"""A process that runs one job after another: a JSON line in for each, a JSON line out.

Started by `launch`; keeps the libraries loaded between runs.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def work(line: str, note: Callable[[str], None]) -> dict[str, Any]:
    """Run the job in `line` and say how it ended; what a person should know goes to `note`."""
    from asymgrpo.errors import Interrupted, UserError
    from asymgrpo.experiment.run import train_run
    from asymgrpo.experiment.settings import RunSettings

    job = json.loads(line)
    try:
        train_run(RunSettings.from_dict(job["settings"]), Path(job["folder"]), say=note)
    except UserError as error:
        return {"error": str(error), "user": True}
    except Interrupted:
        return {"error": "interrupted"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "user": False}
    return {}


def read_jobs(jobs: queue.SimpleQueue[str | None], busy: threading.Event) -> None:
    """Hand lines on; when their sender is gone, let the run in hand save and stop."""
    for line in sys.stdin:
        jobs.put(line)
    jobs.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    # Results go out on the real standard output; whatever libraries print goes to the log.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=read_jobs, args=(jobs, busy), daemon=True).start()

    def send(answer: dict[str, Any]) -> None:
        results.write(json.dumps(answer) + "\n")
        results.flush()

    while (line := jobs.get()) is not None:
        busy.set()
        result = work(line, lambda text: send({"note": text}))
        busy.clear()
        send(result)


if __name__ == "__main__":
    main()
