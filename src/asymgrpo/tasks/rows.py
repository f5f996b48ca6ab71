"""Rows from JSONL files and from the hub, with errors that name the place."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asymgrpo.errors import UserError
from asymgrpo.tasks.base import Example

SPLITS = ("train", "test")


class Source(Protocol):
    """Where rows come from."""

    @property
    def shared(self) -> bool:
        """Whether one and the same rows serve as every split."""
        ...

    def __call__(self, split: str) -> list[Example] | None:
        """The rows of a split, or None where there is no such split."""
        ...


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub: `splits` says which of its splits serves as which of ours."""

    dataset: str
    config: str | None
    splits: dict[str, str]
    shared: bool = False

    def __call__(self, split: str) -> list[Example] | None:
        if split not in self.splits:
            return None
        import datasets

        try:
            rows = datasets.load_dataset(self.dataset, self.config, split=self.splits[split])
        except Exception as error:  # the hub's errors have no common type
            cause = " ".join(str(error).split())[:150] or type(error).__name__
            raise UserError(
                f"cannot load {self.dataset} from the hub ({cause}); "
                "pass --task-path with a JSONL file or a folder"
            ) from error
        return [dict(row) for row in rows]


@dataclass(frozen=True)
class FileSource:
    """A JSONL file, which serves every split, or a folder with train.jsonl and test.jsonl."""

    path: Path

    def __post_init__(self) -> None:
        if not os.path.exists(self.path):  # which takes any name; a path's own method does not
            raise UserError(f"no file or folder at {self.path}; pass --task-path with one")
        if self.path.is_dir() and not any((self.path / f"{s}.jsonl").exists() for s in SPLITS):
            raise UserError(f"no train.jsonl and no test.jsonl in the folder {self.path}")

    @property
    def shared(self) -> bool:
        return self.path.is_file()

    def __call__(self, split: str) -> list[Example] | None:
        file = self.path / f"{split}.jsonl" if self.path.is_dir() else self.path
        return read_jsonl(file) if file.exists() else None


def read_jsonl(file: Path) -> list[Example]:
    """The objects in `file`, one a line; empty lines are skipped."""
    rows: list[Example] = []
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            raise UserError(f"{file}, line {number}: not UTF-8; save the file as UTF-8") from None
        except (ValueError, RecursionError) as error:
            cause = "nested too deep" if isinstance(error, RecursionError) else str(error)
            cause = error.msg if isinstance(error, json.JSONDecodeError) else cause
            raise UserError(f"{file}, line {number}: not JSON ({cause})") from None
        if b"\\ud" in line.lower() and not _is_text(row):
            raise UserError(f"{file}, line {number}: half of a surrogate pair; mend the escape")
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: not a JSON object with columns")
        rows.append(row)
    if not rows:
        raise UserError(f"{file} has no rows")
    return rows


def _is_text(row: Any) -> bool:
    """Whether all text in `row` can be written; an escape may name what is no character."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def column(row: Example, names: Sequence[str]) -> Any | None:
    """The first of `names` that the row has a value for."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def question_key(question: str) -> str:
    """Two questions with one key are the same question."""
    return " ".join(question.split()).casefold()
