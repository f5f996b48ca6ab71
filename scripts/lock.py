"""Pins that hold for every supported Python and platform, by a resolver and the public builds.

    python scripts/lock.py            # what pyproject.toml asks for, into constraints.txt
    python scripts/lock.py --upgrade  # the same, with the newest of everything
    python scripts/lock.py --check    # resolve under the pins for each of them; prints a table

Run by the Python of an environment that has uv, as `make lock` and `make check-lock` do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux ARM": "aarch64-manylinux_2_28",
    "macOS ARM": "aarch64-apple-darwin",
}
OLDEST_MACOS = "14.0"
"""That torch has builds for."""

TORCHS_OWN = re.compile(r"triton|setuptools|(nvidia|cuda)-.*")
"""What a build of torch pins for itself; pins of ours would be in the way of another build."""

OTHER_TRAINER = "verl==0.9.1"
"""Which wants an older transformers than ours."""

HEADER = """\
# Made by `make lock`; `make check-lock` tries it on every supported Python and platform.
# triton and CUDA's libraries are left to torch: each of its builds brings its own.
"""


class Unresolvable(Exception):
    """No set of packages satisfies what is asked for; the resolver's reason."""


def name_of(line: str) -> str:
    """
    >>> name_of("puremagic==1.30 ; python_full_version < '3.12'")
    'puremagic'
    """
    return line.partition("==")[0]


def resolve(*arguments: str, start: str = "", extra: str = "dev") -> list[str]:
    """Lines `name==version`, with markers if need be; `start` holds versions to prefer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pins.txt"
        out.write_text(start, encoding="utf-8")
        command = [
            *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "pyproject.toml"),
            *(("--extra", extra) if extra else ()),
            *("--quiet", "--no-header", "--no-annotate", "--no-config"),
            *("--output-file", str(out), *arguments),
        ]
        environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": OLDEST_MACOS}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        if done.returncode:
            raise Unresolvable(done.stderr.decode(errors="replace").strip())
        return out.read_text(encoding="utf-8").splitlines()


def lock(upgrade: bool) -> None:
    """Write the constraints; versions that still hold stay unless all are to be upgraded."""
    start = "" if upgrade else CONSTRAINTS.read_text(encoding="utf-8")
    lines = resolve("--universal", "--python-version", PYTHONS[0], start=start)
    kept = [line for line in lines if not TORCHS_OWN.fullmatch(name_of(line))]
    CONSTRAINTS.write_text(HEADER + "\n".join(kept) + "\n", encoding="utf-8")
    print(f"wrote {CONSTRAINTS.name}: {len(kept)} pins")


def row(platform: str, python: str, pinned: set[str]) -> tuple[str, bool]:
    """A line of the table, and whether the pins hold there."""
    place = f"{platform:<14}{python:<8}"
    target = ("--python-version", python, "--python-platform", PLATFORMS[platform])
    try:
        lines = resolve("--constraint", str(CONSTRAINTS), *target)
    except Unresolvable as error:
        return f"{place}{error}", False
    versions = dict(line.split("==") for line in lines)
    line = f"{place}{len(lines):<10}{versions['torch']:<10}{versions.get('triton', '-')}"
    missing = [n for n in versions if n not in pinned and not TORCHS_OWN.fullmatch(n)]
    if missing:
        return f"{line}\n  not pinned: {', '.join(missing)}; run `make lock`", False
    return line, True


def row_beside(other: str) -> tuple[str, bool]:
    """What the objective alone gets in one environment with another trainer."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "other.txt"
        wanted.write_text(other, encoding="utf-8")
        place = ("--python-version", "3.12", "--python-platform", PLATFORMS["Linux x86_64"])
        try:
            lines = resolve(str(wanted), *place, extra="")
        except Unresolvable as error:
            return f"the objective beside {other}: {error}", False
    versions = dict(line.split("==") for line in lines)
    found = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    return f"the objective beside {other}: {found}", True


def check() -> bool:
    """Resolve under the pins for each Python and platform; whether they hold for all."""
    pinned = {name_of(line) for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()}
    places = [(platform, python) for platform in PLATFORMS for python in PYTHONS]
    print(f"{'platform':<14}{'Python':<8}{'packages':<10}{'torch':<10}triton")
    with ThreadPoolExecutor(3) as pool:
        rows = list(pool.map(lambda place: row(*place, pinned), places))
    rows.append(row_beside(OTHER_TRAINER))
    for line, _ in rows:
        print(line)
    return all(holds for _, holds in rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(not check())
    lock(upgrade=sys.argv[1:] == ["--upgrade"])
