"""Problems that are already evaluated, kept in a file so that a stopped evaluation goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError, errors_name


def digest(value: Any) -> str:
    """A short name for a JSON-able value; equal values have equal names.

    What JSON does not hold counts by its type alone, since its text may differ between processes.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return type(value).__name__


class PartialResults:
    """Lines of JSON, appended as problems are done; lines of other settings are left alone.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "evaluation.partial.jsonl"
    >>> PartialResults(path, {"seed": 0}).append([(3, "prompt", {"scores": [1.0]})])
    >>> PartialResults(path, {"seed": 0}).load()
    {(3, 'prompt'): {'scores': [1.0]}}
    >>> PartialResults(path, {"seed": 1}).load()
    {}
    """

    def __init__(self, path: Path, setting: Mapping[str, Any]):
        self.path = Path(path)
        self.setting = digest(setting)

    def load(self) -> dict[tuple[int, str], dict[str, Any]]:
        """Problems done under this setting, by index and the digest of prompt and row."""
        self._mend()
        if not self.path.is_file():
            return {}
        done = {}
        text = self.path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            if line:
                row = self._parse(line, number)
                if row["setting"] == self.setting:
                    done[row["index"], row["prompt"]] = row["problem"]
        return done

    def append(self, problems: Iterable[tuple[int, str, Mapping[str, Any]]]) -> None:
        """Add problems, each with its index and the digest of its prompt and row."""
        lines = [
            json.dumps(
                {"setting": self.setting, "index": index, "prompt": prompt, "problem": problem}
            )
            + "\n"
            for index, prompt, problem in problems
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with errors_name(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
            if isinstance(row, dict) and {"setting", "index", "prompt", "problem"} <= row.keys():
                return row
        except (ValueError, RecursionError):
            pass
        raise UserError(
            f"{self.path}:{number} is no evaluated problem; correct that line, or move "
            "the file elsewhere"
        )

    def _mend(self) -> None:
        """Cut off a last line without its newline: the write was interrupted."""
        if not self.path.is_file():
            return
        with open(self.path, "rb+") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                file.truncate(whole)
