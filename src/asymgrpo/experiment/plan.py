"""What a comparison runs: algorithms x seeds x swept fields, each a run with a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.experiment.settings import RunSettings, coerce, make_settings

SPEC_KEYS = ("algorithms", "seeds", "sweep")


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    settings: RunSettings
    folder: Path


def split_spec(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A spec's own keys, and the settings that all of its runs share.

    >>> split_spec({"algorithms": ["grpo"], "steps": 5})
    ({'algorithms': ['grpo']}, {'steps': 5})
    """
    own = {key: value for key, value in record.items() if key in SPEC_KEYS and value is not None}
    _check_spec(own)
    return own, {key: value for key, value in record.items() if key not in SPEC_KEYS}


def _check_spec(own: Mapping[str, Any]) -> None:
    names, seeds, sweep = (own.get(key) for key in SPEC_KEYS)
    if names is not None and not _is_list_of(names, str):
        raise UserError("algorithms must be a list of names, as in [grpo, sa-ah-grpo]")
    if seeds is not None and type(seeds) is not int and not _is_list_of(seeds, int):
        raise UserError("seeds must be how many, or a list of whole numbers")
    values = sweep.values() if isinstance(sweep, Mapping) else (None,)
    if sweep is not None and not all(isinstance(each, list) for each in values):
        raise UserError("sweep must be a mapping of fields to lists, as in {alpha: [0.25, 0.5]}")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def parse_sweeps(words: Sequence[str]) -> dict[str, list[str]]:
    """`alpha=0.25,0.5` to a field and its values.

    >>> parse_sweeps(["alpha=0.25,0.5"])
    {'alpha': ['0.25', '0.5']}
    """
    sweeps = {}
    for word in words:
        key, _, values = word.partition("=")
        if not key or not values:
            raise UserError(f"--sweep takes field=value,value, got {word!r}")
        sweeps[key] = values.split(",")
    return sweeps


def plan(
    algorithms: Sequence[str],
    seeds: int | Sequence[int],
    sweep: Mapping[str, Sequence[Any]],
    shared: Mapping[str, Any],
    out: Path,
) -> list[Job]:
    """The runs, algorithm by algorithm within a seed; two that are the same run are one.

    A sweep over alpha leaves GRPO as it is, and AH-GRPO at alpha 0 is GRPO: each is run once. An
    override that acts under none of the algorithms is an error.
    """
    coerce("algorithms", list(algorithms), list)
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not algorithms or not numbers or len(set(numbers)) < len(numbers):
        raise UserError("a comparison needs at least one algorithm and one or more unlike seeds")
    points = [
        dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())
    ]
    jobs: list[Job] = []
    unused: list[set[str]] = []
    for seed in numbers:
        seen: dict[Any, str] = {}
        for algorithm, point in itertools.product(algorithms, points):
            whole, _ = make_settings(shared, point, {"algorithm": algorithm, "seed": seed})
            settings = _with_acting_overrides(whole)
            unused.append(whole.trainer.keys() - settings.trainer.keys())
            key = _effective(settings)
            if key not in seen:
                seen[key] = settings.label
                jobs.append(Job(settings, out / folder_name(settings)))
    for key in sorted(set.intersection(*unused)):
        raise UserError(f"{key} has no effect under any of {', '.join(algorithms)}; leave it out")
    return jobs


def _with_acting_overrides(settings: RunSettings) -> RunSettings:
    """The same run without overrides that its algorithm has no use for."""
    from asymgrpo.objective.presets import OVERRIDES, acting

    given = {key: value for key, value in settings.trainer.items() if key in OVERRIDES}
    try:
        used = acting(settings.algorithm, given)
    except ValueError as error:
        raise UserError(str(error)) from None
    dropped = given.keys() - used.keys()
    kept = {key: value for key, value in settings.trainer.items() if key not in dropped}
    return replace(settings, trainer=kept)


def folder_name(settings: RunSettings) -> str:
    """A name that is safe as a folder's, whatever the settings hold."""
    words = re.sub(r"[^A-Za-z0-9.=-]+", "-", settings.label).strip("-.")
    return f"{words}-seed{settings.seed}"


def _effective(settings: RunSettings) -> Any:
    """What the run depends on: an objective's inactive pieces and its name are left out."""
    from asymgrpo.objective.config import HorizonConfig
    from asymgrpo.objective.presets import OVERRIDES, algorithm

    given = {key: value for key, value in settings.trainer.items() if key in OVERRIDES}
    try:
        config = algorithm(settings.algorithm, **given)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not config.horizon.active:
        config = replace(config, horizon=HorizonConfig())
    rest = {key: value for key, value in settings.trainer.items() if key not in OVERRIDES}
    return config, repr(sorted(rest.items()))
