"""Ctrl-C and SIGTERM: a run ends at its next step, after a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from asymgrpo.training.processes import any_process, together


class Interruption(TrainerCallback):
    """Asks the trainer to save and stop once a signal has come, in whichever process."""

    def __init__(self) -> None:
        self.requested = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # Every process must stop at the same step: one alone would wait for the others forever.
        self.requested = any_process(self.requested, args.device)
        if self.requested:
            control.should_save = control.should_training_stop = True
        return control


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within, the first signal waits for the step to end; a second one acts as ever.

    Of several processes, a launcher sends each the signal that a terminal may have sent already,
    and kills those that do not end: there a second one changes nothing.

    Python delivers signals to the main thread only, so elsewhere nothing is caught.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        interruption.requested = True
        if together():
            return
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, request)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
