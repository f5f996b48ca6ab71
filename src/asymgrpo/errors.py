"""The one exception that stands for a mistake a user can mend."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """A mistake of the user's, in one line that says what to do; the command line exits with 2.

    >>> raise UserError("no file at data.jsonl; pass --task-path")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no file at data.jsonl; pass --task-path
    """

    def __init__(self, message: object) -> None:
        # A name or a library's text within it may have several lines.
        super().__init__(" ".join(str(message).splitlines()))


class Interrupted(Exception):
    """The user or the machine asked a run to stop, and what it needs to go on is saved."""


_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.ENOTDIR: "choose a path with no file on its way",
    errno.EEXIST: "choose a path with no file on its way",
    errno.EFBIG: "raise the limit on the size of a file",
    errno.EMFILE: "raise the limit on open files",
}


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """An error of the system's within names the file, which a failed write does not.

    >>> with errors_name(Path("a.json")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'a.json'
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def file_error(error: OSError) -> UserError:
    """What the system says of a file, in a line that says what to do.

    >>> file_error(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"))
    UserError('runs/a/metrics.jsonl: No space left on device; free some space, then run the same \
command again')
    """
    place = f"{error.filename}: " if error.filename is not None else ""
    advice = _ADVICE.get(error.errno or 0, "mend that")
    return UserError(f"{place}{error.strerror}; {advice}, then run the same command again")
