"""What a comparison runs: algorithms x seeds x swept fields, each a run with a folder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.experiment.identity import (
    NOT_IDENTITY,
    differences,
    digest,
    folder_name,
    identity,
    labels,
    word,
)
from asymgrpo.experiment.settings import ALIASES, RunSettings, coerce, from_text, make_settings
from asymgrpo.experiment.store import RUN_FILE, RunStore
from asymgrpo.secrets import redacted

SPEC_KEYS = ("algorithms", "seeds", "sweep")


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    settings: RunSettings
    folder: Path
    label: str
    """What the comparison calls it: the algorithm and what differs from the other runs."""


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


def parse_sweeps(words: Sequence[str]) -> dict[str, list[Any]]:
    """`alpha=0.25,0.5` to a field and its values, each of the field's own type.

    >>> parse_sweeps(["lora=4,8"])
    {'lora': [4, 8]}
    """
    sweeps = {}
    for text in words:
        key, _, values = text.partition("=")
        if not key or not values:
            raise UserError(f"--sweep takes field=value,value, got {text!r}")
        if key in sweeps:
            raise UserError(f"--sweep {key} is given twice; write {key}=value,value")
        _refuse_sweep(key)
        sweeps[key] = [from_text(key, value) for value in values.split(",")]
    return sweeps


def parse_seeds(text: str) -> int | list[int]:
    """How many seeds, or which ones.

    >>> parse_seeds("3"), parse_seeds("3,5")
    (3, [3, 5])
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise UserError(f"--seeds takes how many, or numbers by commas, got {text!r}")
    return numbers if "," in text else numbers[0]


INSTEAD = {"seed": "--seeds 3,4 (seeds: [3, 4] in a recipe)", "algorithm": "--algorithms"}
"""What a comparison has an option of its own for."""


def _refuse_sweep(key: str) -> None:
    """Refuse a sweep that would run the same thing several times."""
    name = ALIASES.get(key, key)
    if name in INSTEAD:
        raise UserError(f"a comparison cannot sweep {key}; use {INSTEAD[name]}")
    if name in NOT_IDENTITY:
        raise UserError(
            f"a sweep over {key} would compare equal runs: {NOT_IDENTITY[name]}; leave it out"
        )


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
    for key in sweep:
        _refuse_sweep(key)
    for key in INSTEAD:
        if shared.get(key) is not None:
            raise UserError(f"a comparison takes no {key}; use {INSTEAD[key]}")
    variants = _variants(algorithms, sweep, shared)
    names = labels([record for _, _, record in variants])
    jobs = []
    for seed in numbers:
        for (settings, words, record), label in zip(variants, names, strict=True):
            own = replace(settings, seed=seed)
            folder = out / folder_name([settings.label, *words], seed, identity(record))
            jobs.append(Job(own, folder, label))
    _check_folders(jobs)
    return jobs


Variant = tuple[RunSettings, list[str], dict[str, Any]]
"""Settings, what was swept to get there in words, and the record that identifies them."""


def _variants(
    algorithms: Sequence[str], sweep: Mapping[str, Sequence[Any]], shared: Mapping[str, Any]
) -> list[Variant]:
    """Every algorithm at every point of the sweep, equal ones once."""
    points = [
        dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())
    ]
    found: dict[str, Variant] = {}
    used: set[str] = set()
    for name, point in itertools.product(algorithms, points):
        given = _acting(name, {**shared, **point})
        used |= set(given)
        settings, _ = make_settings(given, {"algorithm": name})
        record = unrun_record(settings)
        swept = [ALIASES.get(key, key) for key in point if key in given]
        words = [word(k, _setting(settings, k)) for k in swept if k not in settings.overrides]
        found.setdefault(digest(identity(record)), (settings, words, record))
    for key in {**shared, **sweep}:
        if key not in used:
            raise UserError(
                f"{key} has no effect under any of {', '.join(algorithms)}; leave it out"
            )
    return list(found.values())


def _setting(settings: RunSettings, key: str) -> Any:
    return settings.trainer[key] if key in settings.trainer else getattr(settings, key)


def _acting(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, without those pieces of an objective that do nothing under this algorithm."""
    from asymgrpo.objective.presets import acting

    overrides = make_settings(given, {"algorithm": name})[0].overrides
    try:
        used = acting(name, overrides)
    except ValueError as error:
        raise UserError(str(error)) from None
    return {key: value for key, value in given.items() if key not in overrides or key in used}


def _check_folders(jobs: Sequence[Job]) -> None:
    """Each run has a folder of its own, which is free or holds this very run."""
    owners: dict[Path, Job] = {}
    for job in jobs:
        if job.folder in owners:
            raise UserError(
                f"{job.label} and {owners[job.folder].label} would share {job.folder}; "
                "give one of them another name"
            )
        owners[job.folder] = job
        refuse_another_run(RunStore(job.folder), job.settings)


def objective_record(settings: RunSettings) -> dict[str, Any]:
    """The objective of a run that has not begun, as plain dicts."""
    from asymgrpo.objective.presets import algorithm

    try:
        return asdict(algorithm(settings.algorithm, **settings.overrides))
    except ValueError as error:
        raise UserError(str(error)) from None


def unrun_record(settings: RunSettings) -> dict[str, Any]:
    """As much of `run.json` as is known before the run, which is enough to identify it."""
    return {
        "algorithm": settings.algorithm,
        "label": settings.label,
        "settings": settings.to_dict(),
        "objective": objective_record(settings),
    }


def with_steps(record: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The record of a run as if it had so many steps; one that has more already stays as it is.

    >>> with_steps({"settings": {"steps": 5}}, 8)
    {'settings': {'steps': 8}}
    """
    settings = record.get("settings") or {}
    if not isinstance(settings.get("steps"), int) or settings["steps"] > steps:
        return dict(record)
    return {**record, "settings": {**settings, "steps": steps}}


def is_done(record: Mapping[str, Any], settings: RunSettings) -> bool:
    """Whether a run has nothing left to do; one that ended after fewer steps is extended.

    >>> is_done({"status": "finished", "steps": 5}, RunSettings(steps=8))
    False
    """
    steps = record.get("steps", settings.steps)
    return record.get("status") == "finished" and bool(steps >= settings.steps)


def refuse_another_run(store: RunStore, settings: RunSettings) -> None:
    """Refuse a folder that holds a run with other settings, or another seed of these.

    One of fewer steps is this run, which goes on from there.
    """
    if not store.exists():
        return
    record = store.run()
    kept = record.get("settings") or {}
    wanted = {"settings": redacted(settings.to_dict())}
    found = differences(with_steps({"settings": kept}, settings.steps), wanted)
    if kept.get("seed", settings.seed) != settings.seed:
        found.append(f"seed {kept['seed']}, not {settings.seed}")
    if not kept:
        raise UserError(
            f"{store.folder / RUN_FILE} has no settings, so the run cannot be continued; choose "
            "another --out"
        )
    if found:
        raise UserError(
            f"{store.folder} holds another run ({'; '.join(found[:3])}); choose another --out"
        )
