"""The set-up, the pins and what goes into the wheel; `.ci/run` has the checks that need a network.

The set-up runs as its own process in a small copy of the repository, with no package index.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NO_INDEX = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "1",
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository of which there is only what the set-up reads."""
    root = tmp_path / "repository"
    (root / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/set_up.py"):
        shutil.copy(ROOT / name, root / name)
    return root


def run_set_up(root: Path, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """`scripts/set_up.py` without a network; `before` is Python that runs ahead of it."""
    code = f"import runpy, sys; {before}; runpy.run_path(sys.argv.pop(), run_name='__main__')"
    command = [sys.executable, "-c", code, str(root / "scripts/set_up.py")]
    environment = os.environ | NO_INDEX
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def bare_environment(root: Path) -> Path:
    """`.venv` as a set-up begins it, without pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    return root / ".venv"


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    return line


def test_without_a_network_there_is_one_line_and_an_unfinished_one_is_made_anew(copy: Path) -> None:
    environment = bare_environment(copy)
    (environment / ".unfinished").touch()
    (environment / "left-over").touch()
    line = one_line(run_set_up(copy))
    assert line == (
        "set-up: pip reached no package index: check the network and pip's index and proxy "
        "settings, then run the same command again"
    )
    assert not (environment / "left-over").exists()
    assert not (environment / ".ready").exists()
    assert not (copy / ".venv-discarded").exists()


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_without_the_venv_module_there_is_one_line(copy: Path, module: str) -> None:
    line = one_line(run_set_up(copy, before=f"sys.modules['{module}'] = None"))
    assert line.startswith(f"set-up: this Python has no {module} module: install it")


def test_without_space_there_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up = load(copy / "scripts/set_up.py")
    text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert set_up.failure(text).startswith("no space left: free some in ")
    set_up.check_space(1000)
    with pytest.raises(set_up.SetUpError, match=r"no space: this needs about 2000000\.0 GB in "):
        set_up.check_space(10**15)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("error: command 'gcc' failed: No such file or directory", "install a C compiler"),
        ("error: command '/usr/bin/x86_64-linux-gnu-gcc' failed with 1", "install a C compiler"),
        ("WARNING: Retrying (Retry(total=0, connect=None", "pip reached no package index"),
        ("ERROR: No matching torch==2.13.0 (from versions: none)", "no build for Python 3."),
        # One attempt failed and the next did not: the reason is another.
        (
            "WARNING: Retrying (Retry(total=4, ...\nERROR: No match for a\nERROR: b",
            "No match for a",
        ),
    ],
)
def test_what_pip_says_becomes_one_line(copy: Path, text: str, line: str) -> None:
    bare_environment(copy)
    said = load(copy / "scripts/set_up.py").failure(text)
    assert line in said
    assert "\n" not in said


def test_what_is_ready_is_left_alone_until_the_pins_change(copy: Path) -> None:
    environment = bare_environment(copy)
    set_up = load(copy / "scripts/set_up.py")
    stamp = set_up.wanted("dev", "", {})
    (environment / ".ready").write_text(json.dumps(stamp))
    done = run_set_up(copy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set_up.wanted("", "", stamp) == stamp
    assert set_up.is_usable(stamp, "")
    assert not set_up.is_usable(stamp, "torch==2.12.0")
    assert not set_up.is_usable(stamp | {"root": "/elsewhere"}, "")
    with (copy / "constraints.txt").open("a") as file:
        file.write("six==1.17.0\n")
    assert "updating .venv" in run_set_up(copy, "sys.modules['ensurepip'] = None").stdout


def test_torch_stays_the_one_that_was_chosen(copy: Path) -> None:
    text = load(copy / "scripts/set_up.py").pins("2.12.1+cpu")
    assert re.findall(r"^torch==.*$", text, re.MULTILINE) == ["torch==2.12.1+cpu"]


def test_an_old_python_gets_one_line(copy: Path) -> None:
    old = copy / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.10.13 || exit 1\n')
    old.chmod(0o755)
    command = ["make", "--silent", "demo", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first == (
        f"asymgrpo needs Python 3.11 or newer, and {old} is Python 3.10.13: "
        "pass another, as in PYTHON=python3.12"
    )
    assert all(re.match(r"make(\[\d+\])?: ", line) for line in rest)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition(" ;")[0].split("==") for line in lines if not line.startswith("#")]
    return dict(found)


def test_torch_is_left_what_it_brings_itself() -> None:
    names = pins()
    assert "torch" in names
    assert not [name for name in names if name.startswith(("triton", "nvidia-", "cuda-"))]


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = ("report", "train", "gym", "logging", "dev")
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(line for name in named for line in extras[name]),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name in ("asymgrpo", "triton"):
            continue
        assert requirement.specifier.contains(pins()[requirement.name.lower()]), requirement


def test_the_wheel_takes_every_file_of_the_package() -> None:
    package = ROOT / "src" / "asymgrpo"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["asymgrpo"]
    files = [path for path in package.rglob("*") if path.is_file()]
    left_out = [
        name
        for name in (path.relative_to(package).as_posix() for path in files)
        if not name.endswith((".py", ".pyc"))
        and not any(fnmatch.fnmatch(name, pattern.replace("**/", "*")) for pattern in patterns)
    ]
    assert not left_out
    assert any(path.suffix == ".yaml" for path in files)
