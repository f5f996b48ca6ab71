"""Digests of what a run reads: its data, its model, and the user's own code. No torch.

They are kept in `run.json`, so that a run does not go on from one input to another in silence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.models.model_sources import Source, find_source
from asymgrpo.tasks.own import names_a_file
from asymgrpo.tasks.rows import SPLITS
from asymgrpo.training.manifest import file_digests

MODEL_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""Files of a model's folder that change what it computes."""


def input_digests(settings: RunSettings, config: Any) -> dict[str, str]:
    """The files that a run reads and their digests; of a model on the hub, its revision.

    Files are named as the settings name them, wherever they lie on this machine. `config` is the
    loaded model's configuration.

    >>> list(input_digests(RunSettings(), None))[:2]
    ['tiny/config.json', 'tiny/generation_config.json']
    """
    files = {
        name: path
        for name, path in (
            *_task_files(settings),
            *_reward_files(settings),
            *_model_files(settings.model, find_source(settings.model)),
        )
        if path.is_file()
    }
    names = sorted(files)
    found = dict(zip(names, file_digests(files[name] for name in names), strict=True))
    revision = getattr(config, "_commit_hash", None)
    return found | ({settings.model: revision} if revision else {})


def refuse_changed_inputs(
    folder: Path, before: Mapping[str, str] | None, now: Mapping[str, str]
) -> None:
    """Refuse to go on with other inputs than the run began with; None of a run that told none.

    >>> refuse_changed_inputs(Path("run"), {"data.jsonl": "ab"}, {"data.jsonl": "cd"})
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: data.jsonl is not as it was when run began; restore it to go on, or \
choose another --out to begin anew
    """
    if before is None:
        return
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UserError(
            f"{changed[0]}{more} is not as it was when {folder} began; restore it to go on, or "
            "choose another --out to begin anew"
        )


Named = Iterator[tuple[str, Path]]


def _task_files(settings: RunSettings) -> Named:
    name = settings.task.partition("?")[0]
    if names_a_file(name):
        yield name, Path(name.rpartition(":")[0])
    family, _, rest = name.partition(":")
    for text in (settings.task_path, rest if family == "jsonl" else None):
        if text and Path(text).is_dir():
            for split in SPLITS:
                yield f"{text}/{split}.jsonl", Path(text) / f"{split}.jsonl"
        elif text:
            yield text, Path(text)


def _reward_files(settings: RunSettings) -> Named:
    for name in settings.reward:
        if names_a_file(name):
            yield name, Path(name.rpartition(":")[0])
        elif ":" in name:  # imported by now, so looking it up runs nothing
            found = importlib.util.find_spec(name.partition(":")[0])
            if found is not None and found.origin is not None:
                yield name, Path(found.origin)


def _model_files(name: str, source: Source) -> Named:
    path = Path(source.location)
    if source.kind == "gguf":
        yield name, path
    elif source.kind != "hub":
        for pattern in MODEL_FILES:
            for file in path.glob(pattern):
                yield f"{name}/{file.name}", file
    if source.base is not None:
        yield from _model_files(f"{name} base", find_source(source.base))
