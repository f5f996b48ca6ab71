"""One process at a time in a run's folder. No torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from asymgrpo.errors import UserError

PATIENCE = 5.0
"""Seconds for a process that was told to end, to end."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within, no other process runs in `folder`; the system ends the lock with the process.

    >>> import tempfile
    >>> with alone_in(Path(tempfile.mkdtemp()) / "run"):
    ...     print("alone")
    alone
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "wb") as file:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # a file system without locks
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process is running in {folder}; wait for it, or choose another --out"
                )
            time.sleep(0.05)
        yield
