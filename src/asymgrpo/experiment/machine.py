"""What the bits of a result depend on beside the settings: threads, processor, GPU, code."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

HOME = Path(__file__).resolve().parents[1]

WORDS = {
    "threads": "threads",
    "cpu": "the processor",
    "vector": "its vector instructions",
    "gpu": "the GPU",
    "driver": "the GPU's driver",
    "code": "the code of asymgrpo",
}
"""The facts, in words."""


def machine_facts() -> dict[str, Any]:
    """Whatever a result's last bits can depend on, in plain JSON types.

    >>> sorted(machine_facts())
    ['code', 'cpu', 'driver', 'gpu', 'threads', 'vector']
    """
    has_gpu = torch.cuda.is_available()
    return {
        "threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": gpu_driver() if has_gpu else None,
        "code": code_version(),
    }


def changed_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """One line on what is other than before; None if nothing is, or nothing is known.

    >>> print(changed_machine({"threads": 2, "cpu": "A"}, {"threads": 1, "cpu": "A"}))
    other than before: threads 2, now 1; the result can differ from that of an uncut run in its \
last bits
    """
    other = [
        f"{words} {before[key]}, now {now.get(key)}"
        for key, words in WORDS.items()
        if key in before and before[key] != now.get(key)
    ]
    if not other:
        return None
    return (
        f"other than before: {'; '.join(other)}; the result can differ from that of an uncut run "
        "in its last bits"
    )


@functools.cache
def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # a system without it
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def gpu_driver() -> str | None:
    """The version of the GPU's driver, where its tool is installed."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = _output(words)
    return found.splitlines()[0].strip() if found else None


@functools.cache
def code_version() -> str:
    """The commit of a checkout, marked where files differ from it; else the package's version."""
    git = ["git", "-C", str(HOME)]
    # A package that is installed below somebody's own repository is not a checkout of it.
    if _output([*git, "ls-files", "__init__.py"]):
        commit = _output([*git, "rev-parse", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--untracked-files=no", "."])
        if commit:
            return f"{commit.strip()} and changes" if changed else commit.strip()
    return importlib.metadata.version("asymgrpo")


def _output(words: list[str]) -> str:
    """What a command prints; nothing where there is no such command, or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
