"""A time limit on a call that stays in its thread.

Users' functions run in the main thread, as under TRL: some set alarms (`signal.alarm`, math-verify
by default), which Python allows nowhere else. So the limit is no alarm of its own: a second thread
sends the main one a signal that nothing else uses, and whose handler raises.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

WAKE = getattr(signal, "SIGURG", None)
"""Ignored unless handled, so that one that comes late does no harm; absent on Windows."""


class DeadlineError(BaseException):
    """The call did not return in time. No Exception, so that the call does not catch it itself."""


def call_within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call()` returns; DeadlineError where it takes longer.

    >>> call_within(60.0, lambda: 7)
    7
    """
    if WAKE is None or threading.current_thread() is not threading.main_thread():
        return _call_in_thread(seconds, call)
    main, done = threading.get_ident(), threading.Event()

    def expire(signum: int, frame: Any) -> None:
        if not done.is_set():
            raise DeadlineError

    def watch() -> None:
        if not done.wait(seconds):
            signal.pthread_kill(main, WAKE)

    before = signal.signal(WAKE, expire)
    watcher = threading.Thread(target=watch, name="deadline", daemon=True)
    watcher.start()
    try:
        try:
            return call()
        finally:
            done.set()
    finally:  # also where the signal came between the call and `done`
        watcher.join()
        signal.signal(WAKE, before)


def _call_in_thread(seconds: float, call: Callable[[], Result]) -> Result:
    """The same where signals do not reach: a call that takes longer is left behind."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="call with a deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise DeadlineError
    return results[0]
