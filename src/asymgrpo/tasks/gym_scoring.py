"""reasoning-gym's scorers; runs inside a sandbox only.

Five of them hand the model's text to SymPy's parser and four to `eval`. `safe_parsing` stands in
for the one, `ast.literal_eval` for the other: what they read is a list of lists at most.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
from typing import Any

from asymgrpo.tasks import safe_parsing

EVALUATING = (
    "algorithmic.string_insertion",
    "algorithmic.spiral_matrix",
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "games.n_queens",
)
"""Modules of reasoning-gym whose scorer calls `eval` on text."""

_dataset: Any = None


def warm_up(name: str, options: dict[str, Any]) -> None:
    """What the server does once, before it forks; some data sets read files for a second."""
    global _dataset
    safe_parsing.install()  # before reasoning-gym binds SymPy's parser to names of its own
    for module in EVALUATING:
        vars(importlib.import_module(f"reasoning_gym.{module}"))["eval"] = ast.literal_eval
    reasoning_gym = importlib.import_module("reasoning_gym")
    _dataset = reasoning_gym.create_dataset(name, **options, seed=0, size=10)


def score(answer: str, entry: dict[str, Any]) -> float:
    """What the data set's scorer gives for `answer`."""
    with contextlib.redirect_stdout(io.StringIO()):
        return float(_dataset.score_answer(answer, entry))
