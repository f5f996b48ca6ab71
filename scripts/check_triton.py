"""The kernels in Triton's interpreter, with the Triton that torch brings and with the newest.

    python scripts/check_triton.py .venv/bin/python

The one that the interpreter's environment has is left out: `make test` runs with it. Run by the
Python of an environment that has uv, as `make check-triton` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lock import CONSTRAINTS, PLATFORMS, PYTHONS, ROOT, resolve

TESTS = ("tests/kernels", "tests/rollout/test_graph_decoder.py")
VERSION = "from importlib.metadata import version; print(version('triton'))"


def version(interpreter: str, folder: str = "") -> str:
    """Triton's, as an interpreter finds it with `folder` before its own packages."""
    environment = os.environ | {"PYTHONPATH": folder}
    command = [interpreter, "-c", VERSION]
    return subprocess.check_output(command, env=environment, text=True).strip()


def torchs_own() -> str:
    platform = PLATFORMS["Linux x86_64"]
    target = ("--python-version", PYTHONS[0], "--python-platform", platform)
    (pin,) = [
        line
        for line in resolve("--constraint", str(CONSTRAINTS), *target)
        if line.startswith("triton==")
    ]
    return pin


def main(interpreter: str) -> int:
    tried = {version(interpreter)}
    print(f"triton {tried}: by the test run")
    for wanted in (torchs_own(), "triton"):
        with tempfile.TemporaryDirectory() as folder:
            install = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            subprocess.run([*install, "--target", folder, wanted], check=True, cwd=ROOT)
            found = version(interpreter, folder)
            if found in tried:
                continue
            tried.add(found)
            print(f"triton {found}: {' '.join(TESTS)}", flush=True)
            environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
            tests = [interpreter, "-m", "pytest", "-n", "auto", *TESTS]
            failed = subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode
            if failed:
                return failed
    return 0


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).absolute())))
