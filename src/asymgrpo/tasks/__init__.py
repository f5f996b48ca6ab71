"""Prompts, answers and graders. No torch.

`load_task` finds a task by its name, `grade_many` grades its completions in parallel, and
`FailureGuard` stops a run whose grader fails instead of letting failures pass for zeros.
"""

from asymgrpo.tasks.base import Example, Grade, Task, reference_of
from asymgrpo.tasks.failures import FailureGuard
from asymgrpo.tasks.own import load_object
from asymgrpo.tasks.parallel import grade_many
from asymgrpo.tasks.prompts import render_prompt
from asymgrpo.tasks.registry import load_task, task_names

__all__ = [
    "Example",
    "FailureGuard",
    "Grade",
    "Task",
    "grade_many",
    "load_object",
    "load_task",
    "reference_of",
    "render_prompt",
    "task_names",
]
