"""From a name to a task."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Task
from asymgrpo.tasks.datatask import ANSWER_COLUMNS, QUESTION_COLUMNS, DataTask
from asymgrpo.tasks.graders import GRADERS
from asymgrpo.tasks.gym import GymTask, gym_names, nearest
from asymgrpo.tasks.own import names_a_file, own_task
from asymgrpo.tasks.prompts import BOXED_INSTRUCTION, PLACEHOLDER, check_template
from asymgrpo.tasks.rows import FileSource, HubSource

DATA_SETS: dict[str, tuple[HubSource, str]] = {
    "gsm8k": (
        HubSource("openai/gsm8k", "main", {"train": "train", "test": "test"}),
        "number",
    ),
    "math500": (HubSource("HuggingFaceH4/MATH-500", None, {"test": "test"}), "math"),
    "aime24": (HubSource("HuggingFaceH4/aime_2024", None, {"test": "train"}), "math"),
    "aime25": (HubSource("math-ai/aime25", None, {"test": "test"}), "math"),
    "amc23": (HubSource("math-ai/amc23", None, {"test": "test"}), "math"),
    # The original repeats each of its 17 thousand questions a hundred times; this one does not.
    "dapo-math-17k": (
        HubSource("open-r1/DAPO-Math-17k-Processed", "all", {"train": "train"}),
        "math",
    ),
}
"""Name to where it is on the hub, and its grader."""
WORKED_OUT = frozenset({"gsm8k"})
"""Data sets whose questions ask for a computation: a sum that is left standing is no answer."""
DATA_OPTIONS = ("shots", "unevaluated")
"""Options of every task that is made of rows."""

OWN_TASKS = {"arithmetic": "asymgrpo.tasks.arithmetic:ArithmeticTask"}
"""Name to a class, imported when it is asked for; options are its keyword arguments."""


def task_names() -> list[str]:
    """The names that `load_task` takes; the last three stand for a family each.

    >>> task_names()[:3]
    ['arithmetic', 'gsm8k', 'math500']
    """
    return [*OWN_TASKS, *DATA_SETS, "jsonl:PATH", "reasoning-gym:NAME", "FILE.py:CLASS"]


def load_task(
    name: str, path: str | Path | None = None, prompt: str | None = None, **options: Any
) -> Task:
    """The task called `name`, or the class `path/file.py:Class`.

    `prompt` is a template with `{question}` or the names of columns in it. `path` is a JSONL file,
    or a folder with train.jsonl and test.jsonl. Options may also stand in the name, as in
    `reasoning-gym:chain_sum?max_terms=4&seed=1`.

    >>> load_task("arithmetic").name
    'arithmetic'
    >>> load_task("gsm9k")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no task 'gsm9k'; did you mean gsm8k?
    """
    file, named = split_options(name) if ".py:" in name else (name, {})
    if names_a_file(file):
        _refuse_path(file, path)
        return own_task(file, prompt, {**named, **options})
    if prompt is not None:
        check_template(prompt)
    family, colon, rest = name.partition(":")
    if family == "jsonl" and colon:
        file, named = split_options(rest)
        return _jsonl_task(file, path, prompt, **{**named, **options})
    bare, named = split_options(name)
    options = {**named, **options}
    if family == "reasoning-gym" and colon:
        _refuse_path(family, path)
        return GymTask(bare.partition(":")[2], prompt, **options)
    if bare in DATA_SETS:
        return _data_set(bare, path, prompt, options)
    if bare in OWN_TASKS:
        _refuse_path(bare, path)
        return _own_task(bare, prompt, options)
    hint = nearest(bare, task_names())
    if "did you mean" not in hint and bare in _installed_gym_names():
        hint = f"; did you mean reasoning-gym:{bare}?"
    raise UserError(f"no task {bare!r}{hint}")


def _data_set(
    name: str, path: str | Path | None, prompt: str | None, options: dict[str, Any]
) -> Task:
    source, grader = DATA_SETS[name]
    unknown = [option for option in options if option not in DATA_OPTIONS]
    if unknown:
        raise UserError(
            f"{name} takes no options but {' and '.join(DATA_OPTIONS)}, and got {unknown[0]}"
        )
    rows = source if path is None else FileSource(Path(path))
    options = {"unevaluated": name not in WORKED_OUT, **_data_options(options)}
    return DataTask(name, rows, prompt or BOXED_INSTRUCTION, grader, **options)


def _data_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked: a number of worked examples, and a yes or no."""
    shots, unevaluated = options.get("shots", 0), options.get("unevaluated", True)
    if isinstance(shots, bool) or not isinstance(shots, int) or shots < 0:
        raise UserError(f"shots is a number of worked examples, not {shots!r}")
    if not isinstance(unevaluated, bool):
        raise UserError(f"unevaluated is true or false, not {unevaluated!r}")
    return {name: options[name] for name in DATA_OPTIONS if name in options}


def _jsonl_task(
    file: str,
    path: str | Path | None,
    prompt: str | None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    grader: str = "math",
    **unknown: Any,
) -> Task:
    chosen = _data_options(unknown)
    wrong = next((option for option in unknown if option not in DATA_OPTIONS), None)
    if wrong is not None:
        names = ["answer_column", "grader", "prompt_column", *DATA_OPTIONS]
        raise UserError(f"jsonl: has no option {wrong!r}; the options are {', '.join(names)}")
    if grader not in GRADERS:
        raise UserError(f"no grader {grader!r}; the graders are {', '.join(GRADERS)}")
    if not file and path is None:
        raise UserError("jsonl: needs a path, as in jsonl:data/rows.jsonl")
    template = prompt or (PLACEHOLDER if grader == "text" else BOXED_INSTRUCTION)
    return DataTask(
        f"jsonl:{file or path}",
        FileSource(Path(file or str(path))),
        template,
        grader,
        (prompt_column,) if prompt_column else QUESTION_COLUMNS,
        (answer_column,) if answer_column else ANSWER_COLUMNS,
        **chosen,
    )


def _own_task(name: str, prompt: str | None, options: dict[str, Any]) -> Task:
    module, _, attribute = OWN_TASKS[name].partition(":")
    build: Callable[..., Task] = getattr(importlib.import_module(module), attribute)
    names = [parameter for parameter in inspect.signature(build).parameters if parameter != "name"]
    for option in options:
        if option not in names:
            raise UserError(f"{name} has no option {option!r}{nearest(option, names)}")
    if prompt is not None:
        options = options | {"prompt_template": prompt}
    return build(**options)


def _refuse_path(name: str, path: str | Path | None) -> None:
    if path is not None:
        raise UserError(f"{name} makes its own rows; leave out --task-path")


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """A task's name and its options; a value is JSON, or else text.

    >>> split_options("reasoning-gym:chain_sum?max_terms=4&seed=1")
    ('reasoning-gym:chain_sum', {'max_terms': 4, 'seed': 1})
    """
    bare, mark, query = name.partition("?")
    options: dict[str, Any] = {}
    for pair in query.split("&") if mark else ():
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise UserError(f"{name}: write options as ?name=value&name=value")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return bare, options


def _installed_gym_names() -> list[str]:
    try:
        return gym_names()
    except UserError:
        return []
