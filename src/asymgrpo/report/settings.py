"""Which settings differ between runs, and which all share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asymgrpo.experiment.identity import identities, identity
from asymgrpo.report.curves import labels_of
from asymgrpo.report.sources import Source

PER_RUN = {"name", "label", "seed", "status", "created", "seconds", "overrides", "finished",
           "resolved", "format", "machine", "sittings"}  # fmt: skip
"""Fields of `run.json` that name a run rather than set it."""
PER_RUN_LEAVES = {"seed", "output_dir", "run_name", "logging_dir", "out"}


@dataclass(frozen=True)
class Settings:
    """`differ`: (name, a value for each label); `shared`: (name, value)."""

    labels: list[str]
    differ: list[tuple[str, list[str]]]
    shared: list[tuple[str, str]]


def compare_settings(sources: Sequence[Source]) -> Settings:
    """Settings side by side, a column a label; several values inside a label stand together."""
    labels = labels_of(sources)
    flat = {run.name: told_once(flatten(run.record)) for run in sources}
    for name, values in resolved_differences(sources).items():
        for run, value in zip(sources, values, strict=True):
            flat[run.name].setdefault(name, value)
    names = sorted({name for settings in flat.values() for name in settings})
    differ, shared = [], []
    for name in names:
        cells = []
        for label in labels:
            own = [flat[run.name].get(name, "–") for run in sources if run.label == label]
            cells.append(" / ".join(dict.fromkeys(own)))
        if len(set(cells)) == 1 and " / " not in cells[0]:
            shared.append((name, cells[0]))
        else:
            differ.append((name, cells))
    return Settings(labels, differ, shared)


def resolved_differences(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Settings that nobody gave and that the runs ended up with otherwise: a value for each run."""
    found = identities([run.record for run in sources])
    given = {name for run in sources for name in identity(run.record, resolved=False)}
    names = dict.fromkeys(name for one in found for name in one if name not in given)
    values = {name: [str(one.get(name, "–")) for one in found] for name in names}
    return {f"config.{name}": texts for name, texts in values.items() if len(set(texts)) > 1}


def told_once(flat: Mapping[str, str]) -> dict[str, str]:
    """Without what was asked for where it stands as resolved too: `settings.model` beside `model`.

    >>> told_once({"model": "tiny", "settings.model": "tiny", "settings.lora": "0"})
    {'model': 'tiny', 'settings.lora': '0'}
    """

    def repeats(name: str) -> bool:
        leaf = name.removeprefix("settings.").removeprefix("trainer.")
        return leaf != name and (leaf in flat or f"config.{leaf}" in flat)

    return {name: value for name, value in flat.items() if not repeats(name)}


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `a.b: text`.

    >>> flatten({"objective": {"kl": {"beta": 0.0}}, "seed": 3, "model": "tiny"})
    {'objective.kl.beta': '0.0', 'model': 'tiny'}
    """
    flat: dict[str, str] = {}
    for key, value in record.items():
        if (not prefix and key in PER_RUN) or key in PER_RUN_LEAVES:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, name + ".")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat
