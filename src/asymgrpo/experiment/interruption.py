"""Ctrl-C and SIGTERM: a run ends at its next step, after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback


class Interruption(TrainerCallback):
    """Asks the trainer to save and stop once a signal has come."""

    def __init__(self) -> None:
        self.requested = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.requested:
            control.should_save = control.should_training_stop = True
        return control


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within, the first signal waits for the step to end; a second one acts as ever.

    Python delivers signals to the main thread only, so elsewhere nothing is caught.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        interruption.requested = True
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, request)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
