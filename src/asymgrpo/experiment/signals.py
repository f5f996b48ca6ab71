"""Ctrl-C and SIGTERM for work that is saved as it goes. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from asymgrpo.errors import Interrupted


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM raise `Interrupted`, also where a shell has set them aside.

    >>> with stopped_by_signals():
    ...     signal.raise_signal(signal.SIGTERM)
    Traceback (most recent call last):
    ...
    asymgrpo.errors.Interrupted
    """

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    caught = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {number: signal.signal(number, stop) for number in caught}
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
