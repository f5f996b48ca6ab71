"""A process that runs one job after another: a JSON line in for each, a JSON line out.

Started by `launch`; keeps the libraries loaded between runs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def work(line: str) -> dict[str, Any]:
    """Run the job in `line` and say how it ended."""
    from asymgrpo.errors import Interrupted, UserError
    from asymgrpo.experiment.run import train_run
    from asymgrpo.experiment.settings import RunSettings

    job = json.loads(line)
    try:
        train_run(RunSettings.from_dict(job["settings"]), Path(job["folder"]))
    except UserError as error:
        return {"error": str(error), "user": True}
    except Interrupted:
        return {"error": "interrupted"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "user": False}
    return {}


def main() -> None:
    # Results go out on the real standard output; whatever libraries print goes to the log.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        result = work(line)
        results.write(json.dumps(result) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
