"""A run on disk: written as it goes, read by the report and by comparisons. No torch.

runs/NAME/
  run.json                    what was asked for, as resolved, with versions, seed and device
  metrics.jsonl               a line a step, append only
  rollouts/step-000040.parquet   sampled rollouts of a step, a row each, with token traces
  evaluations/step-000040.json   an evaluation, per problem
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asymgrpo.errors import UserError, errors_name

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"

ROW_GROUP = 16
"""Rollouts that are written, and read, at a time."""
MOST_VALUES = 1_000_000
"""Values of a column that a scale is made of."""

TOKEN_COLUMNS = {
    "token_ids": pa.int32(),
    "tokens": pa.string(),
    "logps": pa.float32(),
    "entropies": pa.float32(),
    "discount": pa.float32(),
    "ratio": pa.float32(),
    "weight": pa.float32(),
    "grpo_weight": pa.float32(),
    "quadrant": pa.int8(),
    "clipped": pa.bool_(),
}
"""Per-token columns, a list a rollout. `weight` is the factor of the token's log-probability
gradient in the objective, `grpo_weight` the same under plain GRPO; `quadrant` is 0 (inside its
bounds) or 1 to 4."""

ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int32()),
        ("rollout", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("kl", pa.float64()),
        ("truncated", pa.bool_()),
        *((name, pa.list_(kind)) for name, kind in TOKEN_COLUMNS.items()),
    ]
)


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` whole or not at all, also across a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_name(path):
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong above is what matters
            temporary.unlink()
        raise


def read_json(text: str) -> Any:
    """The value in `text`; a whole number beyond 64 bits becomes a float.

    >>> read_json('{"step": 3, "loss": 1' + 400 * "0" + "}")
    {'step': 3, 'loss': inf}
    """
    try:
        return json.loads(text, parse_int=lambda word: (int if len(word) < 19 else float)(word))
    except RecursionError:
        raise ValueError("nested too deep") from None


FORMAT = 2
"""Of a run's folder, kept in `run.json`. Format 1 has no number, and says nothing of the machine;
a change that an older reader would get wrong is a new format, with a step in `UPGRADES`."""

UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda record: {"machine": {}} | record,
}
"""By format: `run.json` of it as the next format has it."""


def upgraded(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """`run.json` of this or an older format, as this format has it.

    >>> upgraded({"seed": 0}, Path("run.json"))
    {'machine': {}, 'seed': 0, 'format': 2}
    >>> upgraded({"format": 9}, Path("run.json"))
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: run.json has format 9, of a newer asymgrpo; this one reads formats \
up to 2, so upgrade it to read this folder
    """
    number = record.get("format", 1)
    if type(number) is not int or number < 1:
        raise UserError(f"{path}: format is {number!r:.60}, which is no format; correct it")
    if number > FORMAT:
        raise UserError(
            f"{path} has format {number}, of a newer asymgrpo; this one reads formats up to "
            f"{FORMAT}, so upgrade it to read this folder"
        )
    for older in range(number, FORMAT):
        record = UPGRADES[older](record)
    return record | {"format": FORMAT}


def read_plan(path: Path) -> dict[str, Any]:
    """What a comparison keeps of its plan, of this or an older format."""
    return upgraded(_read_object(path), path)


RUN_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("name", "status", "algorithm", "label", "model", "task", "device"), str),
    **dict.fromkeys(("overrides", "objective", "config", "settings", "versions"), dict),
    **dict.fromkeys(("resolved", "machine"), dict),
    **dict.fromkeys(("seed", "steps"), int),
    **dict.fromkeys(("seconds",), int | float),
}
"""Fields of `run.json` that are read, and their types."""


class RunStore:
    """One run's folder.

    >>> import tempfile
    >>> store = RunStore(Path(tempfile.mkdtemp()) / "demo")
    >>> store.write_run({"algorithm": "grpo", "seed": 0})
    >>> store.append_metrics(1, {"reward/mean": 0.5})
    >>> store.run()["algorithm"], store.metrics()
    ('grpo', [{'step': 1, 'reward/mean': 0.5}])
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def name(self) -> str:
        return self.folder.name

    def exists(self) -> bool:
        return (self.folder / RUN_FILE).is_file()

    # run.json

    def write_run(self, record: Mapping[str, Any]) -> None:
        text = (
            json.dumps({**record, "format": FORMAT}, indent=2, sort_keys=True, allow_nan=True)
            + "\n"
        )
        write_atomically(self.folder / RUN_FILE, text.encode())

    def run(self) -> dict[str, Any]:
        path = self.folder / RUN_FILE
        if not path.is_file():
            raise UserError(f"{self.folder} holds no run ({RUN_FILE} is missing)")
        record = upgraded(_read_object(path), path)
        for key, kind in RUN_FIELDS.items():
            if record.get(key) is not None and not isinstance(record[key], kind):
                raise UserError(f"{path}: {key} is {record[key]!r:.60}; correct it in the file")
        return record

    def update_run(self, **changes: Any) -> None:
        self.write_run({**self.run(), **changes})

    # metrics.jsonl

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, **metrics}) + "\n"
        path = self.folder / METRICS_FILE
        with errors_name(path), open(path, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line, in order; a last line torn by a crash is not one."""
        return list(self._metric_lines())

    def _metric_lines(self) -> Iterator[dict[str, Any]]:
        path = self.folder / METRICS_FILE
        if not path.is_file():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = read_json(line)
            except ValueError:
                if number == len(lines):  # no newline behind it: the write was cut off
                    return
                raise UserError(f"{path}:{number} is not JSON; correct that line") from None
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise UserError(f'{path}:{number} must be a JSON object with a whole "step"')
            yield row

    def truncate_metrics(self, last_step: int) -> None:
        """Drop a torn last line and all lines after `last_step`, so that a resumed run appends."""
        kept = [row for row in self._metric_lines() if row["step"] <= last_step]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        write_atomically(self.folder / METRICS_FILE, text.encode())

    # rollouts/

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """`rows` have the columns of `ROLLOUT_SCHEMA`; one that is missing is null."""
        clean = [{key: _plain_text(value) for key, value in row.items()} for row in rows]
        table = pa.Table.from_pylist(clean, schema=ROLLOUT_SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
        path = self.rollouts_path(step)
        write_atomically(path, sink.getvalue().to_pybytes())
        return path

    def remove_after(self, last_step: int) -> None:
        """Drop what a resumed run will write again, and what a kill left half-written."""
        for step in self.rollout_steps():
            if step > last_step:
                self.rollouts_path(step).unlink()
        for step in self.evaluation_steps():
            if step > last_step:
                self.evaluation_path(step).unlink()
        for pattern in (".*.tmp", "rollouts/.*.tmp", "evaluations/.*.tmp"):
            for path in self.folder.glob(pattern):
                path.unlink()

    def rollouts_path(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step-{step:06d}.parquet"

    def rollout_steps(self) -> list[int]:
        return _steps(self.folder / "rollouts", ".parquet")

    def thin_rollouts(self, limit: int, spacing: int) -> None:
        """Drop saved steps but for `kept_steps`."""
        saved = self.rollout_steps()
        for step in set(saved) - set(kept_steps(saved, limit, spacing)):
            self.rollouts_path(step).unlink()

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """All rows of a step, with all columns."""
        return [row for batch in self._batches(step, None) for row in batch.to_pylist()]

    def rollouts_at(self, step: int, places: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of a step by their places in it, with all columns; no others are held in memory."""
        found: dict[int, dict[str, Any]] = {}
        start = 0
        for batch in self._batches(step, None):
            inside = [place - start for place in places if 0 <= place - start < batch.num_rows]
            found |= {start + place: batch.slice(place, 1).to_pylist()[0] for place in inside}
            start += batch.num_rows
        return [found[place] for place in places]

    def rollout_columns(self, step: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """All rows of a step, with some columns."""
        return [row for batch in self._batches(step, names) for row in batch.to_pylist()]

    def token_values(self, step: int, names: Sequence[str]) -> np.ndarray:
        """The values of per-token columns as one array; of many, evenly spread ones."""
        every, parts = 1, [np.empty(0, np.float32)]
        for name in names:
            seen = 0
            for batch in self._batches(step, [name]):
                values = batch.column(name).flatten().to_numpy(zero_copy_only=False)
                parts.append(np.array(values[-seen % every :: every], np.float32))
                seen += len(values)
                if sum(map(len, parts)) > MOST_VALUES:
                    every, parts = 2 * every, [np.concatenate(parts)[::2]]
        return np.concatenate(parts)

    def _batches(self, step: int, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """A step's rows, a few at a time."""
        path = self.rollouts_path(step)
        if not path.is_file():
            have = ", ".join(map(str, self.rollout_steps())) or "none"
            raise UserError(f"{self.folder} has no rollouts of step {step}; saved steps: {have}")
        schema = ROLLOUT_SCHEMA
        if names is not None:
            schema = pa.schema([schema.field(name) for name in names])
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROW_GROUP, columns=schema.names):
                    table = pa.Table.from_batches([batch]).cast(schema)
                    table.validate(full=True)
                    yield from table.to_batches()
        except (pa.ArrowException, OSError, ValueError) as error:
            cause = " ".join(str(error).split())[:150]
            raise UserError(
                f"{path} holds no rollouts of a run ({cause}); restore it, or move it elsewhere"
            ) from None

    # evaluations/

    def evaluation_path(self, step: int) -> Path:
        return self.folder / "evaluations" / f"step-{step:06d}.json"

    def write_evaluation(self, step: int, record: Mapping[str, Any]) -> Path:
        path = self.evaluation_path(step)
        write_atomically(path, (json.dumps({"step": step, **record}) + "\n").encode())
        return path

    def evaluation_steps(self) -> list[int]:
        return _steps(self.folder / "evaluations", ".json")

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations, by step; each a record as `evaluation/` makes it."""
        return [_checked_evaluation(self.evaluation_path(step)) for step in self.evaluation_steps()]


def kept_steps(steps: Sequence[int], limit: int, spacing: int) -> list[int]:
    """Of sorted saved steps, at most `limit` that are evenly spread, and the last; 0 is all.

    Steps are saved every `spacing`. Those kept are the first of each stretch, whose length doubles
    as the run grows. So what stays depends on how far the run is, and not on when it was cut.

    >>> kept_steps([1, 2, 3, 4, 5, 6, 7], 4, 1)
    [1, 3, 5, 7]
    """
    if not limit or not steps:
        return list(steps)
    places = (steps[-1] - 1) // spacing + 1
    stretch = 1
    while places > limit * stretch:
        stretch *= 2
    first: dict[int, int] = {}
    for step in steps:
        first.setdefault((step - 1) // spacing // stretch, step)
    return sorted({*first.values(), steps[-1]})


def _steps(folder: Path, suffix: str) -> list[int]:
    names = (path.name for path in folder.glob(f"step-*{suffix}"))
    numbers = (name.removeprefix("step-").removesuffix(suffix) for name in names)
    return sorted(int(number) for number in numbers if number.isdigit())


def _read_object(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable as JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} must hold a JSON object")
    return record


def _checked_evaluation(path: Path) -> dict[str, Any]:
    """The record in `path`, which has what comparisons and the report read of it."""
    record = _read_object(path)
    metrics, problems = record.get("metrics", {}), record.get("problems", [])
    estimates = metrics.values() if isinstance(metrics, dict) else [None]
    rows = problems if isinstance(problems, list) else [None]
    whole = type(record.get("step")) is int and all(
        isinstance(estimate, dict)
        and all(_is_number(estimate.get(part)) for part in ("value", "low", "high"))
        for estimate in estimates
    )
    if not whole or not all(
        isinstance(row, dict)
        and isinstance(row.get("scores"), list)
        and all(map(_is_number, row["scores"]))
        for row in rows
    ):
        raise UserError(f"{path} is no evaluation of a run; restore it, or move it elsewhere")
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_text(value: Any) -> Any:
    """Parquet holds UTF-8 only: a lone surrogate in a model's text becomes a replacement mark."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [_plain_text(item) for item in value]
    return value
