"""Counting the answers that a grader failed on, and stopping before they pass for zeros."""

from __future__ import annotations

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Grade


class FailureGuard:
    """Counts failed grades; raises once they are more than `share` of at least `after` answers.

    >>> guard = FailureGuard()
    >>> guard.count(Grade(1.0, "4", "equal"))
    >>> guard.count(Grade(0.0, None, "no result in time", failed=True))
    >>> guard.failed, guard.total
    (1, 2)
    """

    def __init__(self, share: float = 0.05, after: int = 50) -> None:
        self.share = share
        self.after = after
        self.failed = 0
        self.total = 0

    def count(self, grade: Grade) -> None:
        """Take in one grade."""
        self.total += 1
        if not grade.failed:
            return
        self.failed += 1
        if self.total >= self.after and self.failed > self.share * self.total:
            raise UserError(
                f"the grader failed on {self.failed} of {self.total} answers, more than "
                f"{self.share:.0%}; the last failure: {grade.reason}"
            )
