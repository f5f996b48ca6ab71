"""The one exception that stands for a mistake a user can mend."""


class UserError(ValueError):
    """A mistake of the user's, in one line that says what to do; the command line exits with 2.

    >>> raise UserError("no file at data.jsonl; pass --task-path")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no file at data.jsonl; pass --task-path
    """


class Interrupted(Exception):
    """The user or the machine asked a run to stop, and what it needs to go on is saved."""
