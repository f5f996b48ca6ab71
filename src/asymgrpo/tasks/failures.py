"""Counting the answers that a grader failed on, and stopping before they pass for zeros."""

from __future__ import annotations

from collections.abc import Iterable

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Grade


class FailureGuard:
    """Counts failed grades; raises once they are more than `share` of at least `after` answers.

    >>> guard = FailureGuard()
    >>> guard.count([Grade(1.0, "4", "equal"), Grade(0.0, None, "no result in time", failed=True)])
    1
    >>> guard.failed, guard.total
    (1, 2)
    """

    def __init__(self, share: float = 0.05, after: int = 50) -> None:
        self.share = share
        self.after = after
        self.failed = 0
        self.total = 0

    def count(self, grades: Iterable[Grade]) -> int:
        """Take in a batch; returns how many of it failed."""
        failed = 0
        reason = ""
        for grade in grades:
            self.total += 1
            if grade.failed:
                failed += 1
                reason = grade.reason
        self.failed += failed
        if failed and self.total >= self.after and self.failed > self.share * self.total:
            raise UserError(
                f"the grader failed on {self.failed} of {self.total} answers, more than "
                f"{self.share:.0%}; the last failure: {reason}"
            )
        return failed
