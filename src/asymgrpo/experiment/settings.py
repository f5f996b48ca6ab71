"""What to run: settings from defaults, a recipe and flags, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from asymgrpo.errors import UserError

MOST = 2**32 - 1
"""The largest number a setting may have; numpy takes no larger seed."""


@dataclass(frozen=True)
class RunSettings:
    """One training run, in full. `trainer` holds fields of `AsymGRPOConfig` by name."""

    algorithm: str = "grpo"
    model: str = "tiny"
    task: str = "arithmetic"
    task_path: str | None = None
    prompt: str | None = None
    """A template with {question}, in place of the task's own."""
    system_prompt: str | None = None
    """The system message before every prompt; plain text before it without a chat template."""
    reward: tuple[str, ...] = ()
    """`module:function` as TRL takes them, or `task` for the task's grader, the default."""
    reward_timeout: float = 600.0
    """Seconds that a reward function of the user's may take for a batch."""
    steps: int = 100
    """Optimiser steps."""
    seed: int = 0
    lora: int = 0
    """Rank of the adapter; 0 trains all weights."""
    engine: str = "native"
    scorer: str = "packed"
    eval_every: int = 0
    """Held-out evaluation every so many steps, and before and after; 0 for none."""
    eval_problems: int = 200
    eval_samples: int = 8
    cluster: str | None = None
    """A column that names the family of a held-out problem; intervals then resample families."""
    sample_every: int = 1
    """Save traces of every so many rollout batches; 0 for none."""
    sample_groups: int = 2
    """Prompts whose rollouts are saved, of a batch."""
    keep_rollouts: int = 256
    """Steps whose saved rollouts stay, evenly spread with the first and the last; 0 for all."""
    trust_remote_code: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {
            "steps": 1, "lora": 0, "eval_every": 0, "eval_problems": 1, "eval_samples": 1,
            "sample_every": 0, "sample_groups": 1, "keep_rollouts": 0, "seed": 0,
            "reward_timeout": 0.001,
        }  # fmt: skip
        for name, smallest in least.items():
            if not smallest <= getattr(self, name) <= MOST:
                raise UserError(
                    f"{name} must be at least {smallest}, got {reprlib.repr(getattr(self, name))}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self) | {"reward": list(self.reward)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RunSettings:
        unknown = record.keys() - {entry.name for entry in dataclasses.fields(cls)}
        if unknown:
            raise UserError(f"the run has settings unknown here: {', '.join(sorted(unknown))}")
        return cls(**{**record, "reward": tuple(record.get("reward", ()))})

    @property
    def overrides(self) -> dict[str, Any]:
        """The pieces of the objective that were given."""
        from asymgrpo.objective.presets import OVERRIDES

        return {key: self.trainer[key] for key in OVERRIDES if key in self.trainer}

    @property
    def label(self) -> str:
        """The algorithm and what overrides it."""
        from asymgrpo.experiment.identity import base_label

        return base_label({"algorithm": self.algorithm, "overrides": self.overrides})

    @property
    def default_name(self) -> str:
        """A folder's name that tells this run from others: what it is, and what was set.

        The number of steps is no part of it, so that more of them go on in the same folder.
        """
        from asymgrpo.experiment.identity import digest, folder_name, identity, word

        one = identity({"settings": self.to_dict()})
        del one["steps"]
        usual = identity({"settings": RunSettings(trainer=self._usual_trainer).to_dict()})
        named = {"algorithm", "model", "task", *self.overrides}
        words = [word(k, one[k]) for k in one if k not in named and one[k] != usual.get(k)]
        if len(words) > 2:
            words = [digest(one)[:6]]
        return folder_name([self.label, Path(self.model).name, self.task, *words], self.seed, one)

    @property
    def _usual_trainer(self) -> dict[str, Any]:
        return TINY_DEFAULTS if self.model == "tiny" else {}


TINY_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 128,
    "steps_per_generation": 4,
    "num_generations": 8,
    "max_completion_length": 56,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
}
"""Trainer settings under which the built-in model learns; used unless others are given."""

ALIASES = {"max_steps": "steps", "output_dir": "out"}
"""TRL's names for what has a name of its own here."""

RECIPE_NOTES = ("description", "expect", "paper")
"""Keys of a recipe that are for its reader."""


def recipe_files() -> dict[str, Path]:
    """The recipes that come with the package, by the names that `--config` takes.

    >>> recipe_files()["demo"].name
    'demo.yaml'
    """
    folder = Path(str(files("asymgrpo"))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str | Path) -> dict[str, Any]:
    """The mapping in a recipe that comes with the package, or in a YAML file; its notes left out.

    A name of the package's goes before a file of that name here; `./demo` is the file.

    >>> load_recipe("demo")["algorithms"]
    ['grpo', 'ah-grpo', 'sa-ah-grpo', 'abc-grpo']

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "recipe.yaml"
    >>> _ = file.write_text("algorithm: grpo\\nexpect: better\\nlearning_rate: 1e-6\\n")
    >>> load_recipe(file)
    {'algorithm': 'grpo', 'learning_rate': '1e-6'}
    """
    own = recipe_files()
    file = own.get(str(name), Path(name))
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no recipe at {file}; pass the path of a YAML file, or one of {', '.join(own)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{file} must be a mapping of names to values")
    return {key: value for key, value in content.items() if key not in RECIPE_NOTES}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` words, each value read as YAML.

    >>> parse_assignments(["alpha=0.25", "bf16=true"])
    {'alpha': 0.25, 'bf16': True}
    """
    parsed: dict[str, Any] = {}
    for word in assignments:
        key, separator, value = word.partition("=")
        if not separator or not key:
            raise UserError(f"--set takes key=value, got {word!r}")
        try:
            parsed[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise UserError(f"--set {key}: {value!r:.60} is not a value") from None
    return parsed


@functools.cache
def trainer_fields() -> dict[str, Any]:
    """Name to type of every field of `AsymGRPOConfig`."""
    from asymgrpo.training.trl import AsymGRPOConfig

    hints = typing.get_type_hints(AsymGRPOConfig)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(AsymGRPOConfig)}


def trainer_defaults() -> dict[str, Any]:
    """Name to default of every field of `AsymGRPOConfig` that has a plain one."""
    from asymgrpo.training.trl import AsymGRPOConfig

    fields = dataclasses.fields(AsymGRPOConfig)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def make_settings(*layers: Mapping[str, Any]) -> tuple[RunSettings, str | None]:
    """Settings from layers, later ones first in force, and the output folder if one was named.

    Keys are fields of `RunSettings` or of `AsymGRPOConfig`; None in a layer says nothing.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if value is not None:
                merged[ALIASES.get(key, key)] = value
    out = merged.pop("out", None)
    own_types = typing.get_type_hints(RunSettings)
    own, trainer = {}, {}
    theirs: dict[str, Any] | None = None
    for key, value in merged.items():
        if key in own_types and key != "trainer":
            own[key] = coerce(key, value, own_types[key])
            continue
        theirs = trainer_fields() if theirs is None else theirs
        if key not in theirs:
            raise UserError(unknown_key(key, [*own_types, *theirs]))
        trainer[key] = coerce(key, value, theirs[key])
    if own.get("model", "tiny") == "tiny":
        trainer = TINY_DEFAULTS | trainer
    return RunSettings(**own, trainer=trainer), out


def from_text(key: str, text: str) -> Any:
    """A value of the command line as the field's own type.

    >>> from_text("lora", "8"), from_text("model", "8")
    (8, '8')
    """
    kind = _kind(ALIASES.get(key, key))
    if kind is str or kind == str | None:
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    return coerce(key, value, kind)


def _kind(key: str) -> Any:
    """The type of a setting, of ours or of the trainer's."""
    own = typing.get_type_hints(RunSettings)
    if key in own and key != "trainer":
        return own[key]
    theirs = trainer_fields()
    if key not in theirs:
        raise UserError(unknown_key(key, [*own, *theirs]))
    return theirs[key]


def unknown_key(key: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(set(valid)), n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return f"unknown setting {key!r}{hint}"


def coerce(key: str, value: Any, kind: Any) -> Any:
    """`value` as a field of type `kind` takes it; YAML reads 1e-6 as text, which a number is.

    >>> coerce("learning_rate", "1e-6", float)
    1e-06
    >>> coerce("steps", "many", int)
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: steps must be a whole number, got 'many'
    """
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    plain = [typing.get_origin(option) or option for option in options]
    if value is None and types.NoneType in plain:
        return None
    if any(option in (Any, object) for option in plain):
        return value
    for option in (bool, int, float, str, list, tuple, dict):
        if option not in plain:
            continue
        fitted = _fit(value, option)
        if fitted is not None:
            return fitted
    basic = {bool, int, float, str, list, tuple, dict, types.NoneType}
    if not set(plain) <= basic:  # an enum or a class of transformers', which checks for itself
        return value
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text",
             list: "a list", tuple: "a list", dict: "a mapping"}  # fmt: skip
    wanted = " or ".join(words[option] for option in words if option in plain)
    raise UserError(f"{key} must be {wanted}, got {reprlib.repr(value)}")


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _fit(value: Any, option: type) -> Any:
    """`value` as an `option`, or None if it is not one."""
    if option is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if option is tuple:
        words = [value] if isinstance(value, str) else value
        texts = isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)
        return tuple(words) if texts else None
    if option is float:
        try:
            return float(value) if isinstance(value, int | float | str) else None
        except (ValueError, OverflowError):
            return None
    return value if isinstance(value, option) else None
