"""Digests of a checkpoint's files, by which damage is noticed before anything is loaded. No torch.

The manifest is written last, so a checkpoint that has one is complete. One that was saved without
(by stock TRL, or by an earlier version) is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
SET_ASIDE = "damaged-"
"""What the name of a damaged checkpoint begins with from then on."""


def file_digest(path: Path) -> str:
    """The BLAKE2b digest of a file's bytes, read in pieces.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "file"
    >>> _ = file.write_bytes(b"abc")
    >>> file_digest(file)[:16]
    'bddd813c63423972'
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """The digests of several files; the hash lets go of the interpreter, so threads do help.

    >>> file_digests([])
    []
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(file_digest, paths))


def write_manifest(folder: Path) -> None:
    """Write the digests of all files under `folder` into it."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    (folder / MANIFEST).write_bytes(_manifest(folder, names))


def _manifest(folder: Path, names: list[str]) -> bytes:
    digests = file_digests(folder / name for name in names)
    return (json.dumps(dict(zip(names, digests, strict=True)), indent=1) + "\n").encode()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None where nothing is, or no manifest tells.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "optimizer.pt").write_bytes(b"state")
    >>> write_manifest(folder)
    >>> damage(folder)
    >>> _ = (folder / "optimizer.pt").write_bytes(b"statf")
    >>> damage(folder)
    'optimizer.pt has changed since it was saved'
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        told: dict[str, str] = json.loads(path.read_bytes())
        names = list(told)
        for name in names:
            if not (folder / name).is_file():
                return f"{name!s:.60} is missing"
        found = _manifest(folder, names)
    except (ValueError, TypeError, OSError, AttributeError):
        return f"{MANIFEST} cannot be read"
    now = json.loads(found)
    for name in names:
        if now[name] != told[name]:
            return f"{name} has changed since it was saved"
    return None if found == path.read_bytes() else f"{MANIFEST} has changed since it was saved"


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing goes on from it and nothing is lost.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "checkpoint-2"
    >>> folder.mkdir()
    >>> set_aside(folder).name
    'damaged-checkpoint-2'
    """
    place, number = checkpoint.with_name(SET_ASIDE + checkpoint.name), 1
    while place.exists():
        number += 1
        place = checkpoint.with_name(f"{SET_ASIDE}{checkpoint.name}-{number}")
    return checkpoint.rename(place)


def newest_whole(found: Iterable[Path], say: Callable[[str], None]) -> Path | None:
    """The last of the checkpoints `found`, oldest first, that is as it was saved.

    Those after it are set aside, with a line each.

    >>> newest_whole([], print)
    """
    for checkpoint in reversed(list(found)):
        wrong = damage(checkpoint)
        if wrong is None:
            if not (checkpoint / MANIFEST).is_file():
                say(f"{checkpoint} has no {MANIFEST}: it is taken as it is, unchecked")
            return checkpoint
        say(f"{checkpoint} is damaged ({wrong}); it is now {set_aside(checkpoint).name}")
    return None
