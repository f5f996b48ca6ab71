"""Tasks and reward functions in a file of the user's own: `path/file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Task

MEMBERS = ("name", "examples", "prompt", "grade")
"""What a task must have."""


def names_a_file(spec: str) -> bool:
    """Whether `spec` has the form `path/file.py:Name`.

    >>> names_a_file("my/tasks.py:Reverse"), names_a_file("jsonl:rows.jsonl"), names_a_file("gsm8k")
    (True, False, False)
    """
    path, colon, name = spec.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


def load_object(spec: str) -> Any:
    """What `path/file.py:Name` names; `UserError` where the file or the name is not there.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "rewards.py"
    >>> _ = file.write_text("def short(completions, **_): return [-len(c) for c in completions]")
    >>> load_object(f"{file}:short")(["abc"])
    [-3]
    """
    if not names_a_file(spec):
        raise UserError(f"{spec!r} is not of the form path/file.py:Name")
    path, _, name = spec.rpartition(":")
    module = _module(Path(path))
    if not hasattr(module, name):
        there = [
            n for n, o in vars(module).items() if getattr(o, "__module__", "") == module.__name__
        ]
        raise UserError(
            f"{path} has no {name}; it has {', '.join(there) or 'no class or function'}"
        )
    return getattr(module, name)


def _module(path: Path) -> ModuleType:
    """The file as a module; the same file is run once, and finds the modules beside it."""
    if not path.is_file():
        raise UserError(f"no file at {path}; write --task or --reward as path/file.py:Name")
    place = path.resolve()
    name = f"{place.stem}_{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, place)
    assert found is not None  # a name that ends in .py always has a loader
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    try:
        found.loader.exec_module(module)
    except Exception as error:  # whatever a file of the user's raises, in one line
        del sys.modules[name]
        line = _line_in(place, error)
        raise UserError(f"{path}{line}: {type(error).__name__}: {error}") from error
    return module


def _line_in(place: Path, error: Exception) -> str:
    trace, line = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(place):
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line


def own_task(spec: str, prompt: str | None, options: dict[str, Any]) -> Task:
    """The task that `path/file.py:Class` names, made with the options; an instance serves too."""
    found = load_object(spec)
    if prompt is not None:
        options = {"prompt": prompt, **options}
    if inspect.isclass(found) or (callable(found) and not hasattr(found, "examples")):
        _check_options(spec, found, options)
        try:
            found = found(**options)
        except UserError:
            raise
        except Exception as error:  # of the user's own code
            raise UserError(f"{spec}: {type(error).__name__}: {error}") from error
    elif options:
        raise UserError(f"{spec} is made already and takes no options; name its class instead")
    missing = [member for member in MEMBERS if not hasattr(found, member)]
    if missing:
        raise UserError(f"{spec} is no task: it lacks {', '.join(missing)}")
    task: Task = found
    return task


def _check_options(spec: str, build: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = inspect.signature(build).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            there = ", ".join(parameters) or "none"
            raise UserError(f"{spec} has no option {option!r}; its options are: {there}")
