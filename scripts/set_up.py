"""Make `.venv` ready, or find that it is: one line per stage, and one line for what fails.

    python scripts/set_up.py            # what the commands need
    python scripts/set_up.py dev        # and what the tests and the linters need

The interpreter that runs this is the environment's. `TORCH` in the process's environment is what
pip is asked for in place of the pinned torch: a wheel, or `torch --index-url ADDRESS`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".ready"
UNFINISHED = VENV / ".unfinished"
LOG = VENV / "set-up.log"
AGAIN = "then run the same command again"

FAILURES = {
    r"No space left on device|Errno 28|Errno 122": (
        f"no space left: free some in {ROOT} and {tempfile.gettempdir()} (TMPDIR), {AGAIN}"
    ),
    r"command '[^']*(cc|g\+\+|clang)[^']*' failed|Python\.h": (
        "a package has to be compiled, and that failed: install a C compiler and Python's "
        f"headers (Debian and Ubuntu: apt install gcc python3-dev), {AGAIN}"
    ),
    r"Retry\(total=0|Max retries exceeded|ConnectionError|ReadTimeout|IncompleteRead": (
        "pip reached no package index: check the network and pip's index and proxy settings, "
        f"{AGAIN}"
    ),
    r"from versions: none": (
        f"pip found no build for Python {platform.python_version()} on {platform.machine()}: pass "
        f"another Python (PYTHON=) or torch (TORCH=), or check pip's index settings, {AGAIN}"
    ),
}
"""What pip may say, and the line that stands for it; the first match counts."""


class SetUpError(Exception):
    """One line that says what to do."""


def failure(log: str) -> str:
    """The one line for a run of pip or venv that failed; a log of what is not known is kept."""
    for pattern, line in FAILURES.items():
        if re.search(pattern, log):
            return line
    LOG.write_text(log, encoding="utf-8")
    errors = re.findall(r"^ERROR: (.*)$", log, re.MULTILINE) or log.strip().splitlines()[-1:]
    return f"pip failed: {''.join(errors[:1])} (all that it said is in {LOG})"


def run(*command: str) -> None:
    """Run it and keep what it says to ourselves, unless it fails."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise SetUpError(failure(done.stdout.decode(errors="replace")))


def pip(*arguments: str) -> None:
    run(str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


@contextlib.contextmanager
def unfinished() -> Iterator[None]:
    """An environment that is cut off or fails within is made anew the next time."""
    UNFINISHED.touch()
    yield
    UNFINISHED.unlink()


def planned(arguments: list[str]) -> list[dict[str, Any]]:
    """What pip would install for `arguments`, by its own report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "--quiet", "--dry-run", "--report", str(report), *arguments)
        packages: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return packages


def file_size(url: str) -> int | None:
    """Bytes of a file, on the network or on this machine; None where nobody says."""
    if url.startswith("file:"):
        path = urllib.request.url2pathname(urllib.parse.urlsplit(url).path)
        return os.path.getsize(path) if os.path.isfile(path) else 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as got:
            length = got.headers.get("Content-Length")
    except OSError:  # an index that wants a password, or knows no HEAD: the size is only for show
        return None
    return int(length) if length else None


def readable(size: int) -> str:
    """
    >>> readable(2_940_000_000), readable(310_400_000), readable(900_000)
    ('2.9 GB', '310 MB', '1 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(1, round(size / 1e6))} MB"


def in_words(urls: list[str], sizes: list[int | None]) -> str:
    """How many packages there are to install, and how much of them to download.

    >>> in_words(["https://a/a.whl", "https://a/b.whl"], [2_000_000, 1_000_000])
    '2 packages, 3 MB to download'
    >>> in_words(["file:///a.whl"], [2_000_000]), in_words(["https://a/a.whl"], [None])
    ('1 package, nothing to download', '1 package, size of the download unknown')
    """
    count = f"{len(urls)} package{'s' if len(urls) > 1 else ''}"
    remote = [size for url, size in zip(urls, sizes, strict=True) if not url.startswith("file:")]
    if None in remote:
        return f"{count}, size of the download unknown"
    download = sum(filter(None, remote))
    return f"{count}, {readable(download) if download else 'nothing'} to download"


def check_space(wheels: int) -> None:
    """Refuse before a download for which there is no room; wheels unpack to twice their size."""
    for place, needed in ((str(ROOT), 2 * wheels), (tempfile.gettempdir(), wheels)):
        free = shutil.disk_usage(place).free
        if free < needed:
            raise SetUpError(
                f"no space: this needs about {readable(needed)} in {place}, which has "
                f"{readable(free)} free; free some, {AGAIN}"
            )


def size_of(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )


def install(name: str, arguments: list[str]) -> None:
    """One stage: say what it takes, do it, say what it took."""
    start, before = time.monotonic(), size_of(VENV)
    print(f"  {name:<12}", end="", flush=True)
    urls = [package["download_info"]["url"] for package in planned(arguments)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(file_size, urls))
    if not urls:
        print("already there")
        return
    print(in_words(urls, sizes), end=" ... ", flush=True)
    check_space(sum(filter(None, sizes)))
    with unfinished():
        pip("install", *arguments)
    grown = max(0, size_of(VENV) - before)
    print(f"{readable(grown)} on disk, {time.monotonic() - start:.0f} s", flush=True)


def same_python() -> bool:
    """Whether the environment's interpreter runs and is this one's version."""
    if not os.access(PYTHON, os.X_OK):
        return False
    done = subprocess.run(
        [str(PYTHON), "-c", "import platform; print(platform.python_version())"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() == platform.python_version()


def discard_environment() -> None:
    """Aside in one step, so that one half removed is never taken for whole."""
    aside = VENV.with_name(".venv-discarded")
    shutil.rmtree(aside, ignore_errors=True)
    if VENV.exists():
        VENV.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def make_environment(fresh: bool) -> None:
    """`.venv` with pip in it; `fresh` empties it first."""
    print(f"  {'environment':<12}", end="", flush=True)
    start = time.monotonic()
    missing = [name for name in ("venv", "ensurepip") if not importlib.util.find_spec(name)]
    if missing:
        raise SetUpError(
            f"this Python has no {missing[0]} module: install it (Debian and Ubuntu: apt install "
            f"python3-venv) or choose another by PYTHON=..., {AGAIN}"
        )
    if fresh:
        discard_environment()
    VENV.mkdir(exist_ok=True)
    with unfinished():
        run(sys.executable, "-m", "venv", str(VENV))
        pip("install", "--quiet", "--upgrade", "pip")
    print(f"Python {platform.python_version()}, {time.monotonic() - start:.0f} s", flush=True)


def pins(torch: str) -> str:
    """The constraints with torch at the version that is installed, which may be another build."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("torch==")]
    return "\n".join([*kept, f"torch=={torch}", ""])


def installed_torch() -> str:
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run(
        [str(PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def wanted(extra: str, torch: str, done: dict[str, Any]) -> dict[str, Any]:
    """What the stamp of a finished set-up says; a choice of torch and of dev stay chosen."""
    content = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    return {
        "pins": hashlib.sha256(content).hexdigest(),
        "root": str(ROOT),
        "torch": torch or done.get("torch", ""),
        "extra": "dev" if "dev" in (extra, done.get("extra")) else extra,
    }


def read_stamp() -> dict[str, Any]:
    try:
        done: dict[str, Any] = json.loads(STAMP.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return done


def is_usable(done: dict[str, Any], torch: str) -> bool:
    """Whether the environment can stay: whole, of this Python, in its place, of the torch chosen.

    With another torch asked for, pip would be content with the one that is there.
    """
    return (
        not UNFINISHED.exists()
        and same_python()
        and done.get("root", str(ROOT)) == str(ROOT)
        and torch in ("", done.get("torch"))
    )


def set_up(extra: str, torch: str) -> None:
    done = read_stamp()
    fresh = not is_usable(done, torch)
    done = {} if fresh else done
    goal = wanted(extra, torch, done)
    if goal == done:
        return
    start = time.monotonic()
    doing = "updating" if done else "setting up"
    print(f"{doing} {VENV.name}, once; if it is cut off, the same command starts it again")
    make_environment(fresh)
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    install("torch", shlex.split(goal["torch"]) or [pinned.group() if pinned else "torch"])
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(pins(installed_torch()), encoding="utf-8")
        install("asymgrpo", ["--constraint", str(constraints), "--editable", f".[{goal['extra']}]"])
    STAMP.write_text(json.dumps(goal, indent=1) + "\n", encoding="utf-8")
    print(f"  {'ready':<12}{readable(size_of(VENV))} in all, {time.monotonic() - start:.0f} s")


def main() -> int:
    """The exit code; a failure is one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(sys.argv[1] if len(sys.argv) > 1 else "train", os.environ.get("TORCH", ""))
    except SetUpError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"\nset-up: stopped; to go on, {AGAIN.removeprefix('then ')}", file=sys.stderr)
        return 130
    except OSError as error:
        print(
            f"\nset-up: {error.filename or VENV}: {error.strerror}; fix that, {AGAIN}",
            file=sys.stderr,
        )
    else:
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
