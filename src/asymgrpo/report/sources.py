"""What a report reads: our run folders, and TRL output folders with a `trainer_state.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asymgrpo.errors import UserError
from asymgrpo.experiment.identity import base_label, labels
from asymgrpo.experiment.store import RUN_FILE, RunStore, read_json
from asymgrpo.secrets import redacted

STATE_FILE = "trainer_state.json"

ALIASES = {
    "reward/mean": ("reward",),
    "reward/std": ("reward_std",),
    "reward/zero_variance_groups": ("frac_reward_zero_std",),
    "entropy/mean": ("entropy",),
    "gradient/norm": ("grad_norm",),
    "kl/mean": ("kl",),
    "length/mean": ("completions/mean_length", "completion_length"),
    "length/truncated": ("completions/clipped_ratio",),
    "time/step": ("step_time",),
    "evaluation/reward": ("eval_reward", "eval_rewards/mean"),
}
"""Our name of a metric, and TRL's names for the same."""

SEED_SUFFIX = re.compile(r"[-_.]s(?:eed)?[-_.]?(\d+)$")


@dataclass(frozen=True)
class Source:
    """One run, whoever wrote it, under our metric names."""

    folder: Path
    name: str
    label: str
    """What the run stands for; runs of one label differ by their seed only."""
    kind: str
    """"asymgrpo" or "trl"."""
    seed: int | None
    record: Mapping[str, Any]
    """`run.json`, or what a TRL folder tells of its settings."""
    metrics: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def store(self) -> RunStore | None:
        """Where its rollouts are, if it keeps any."""
        return RunStore(self.folder) if self.kind == "asymgrpo" else None

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values at which the metric was measured; what is not finite is left out."""
        pairs = [
            (row["step"], float(row[metric])) for row in self.metrics if _is_number(row.get(metric))
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]


def find_sources(folders: Iterable[str | Path]) -> list[Source]:
    """The runs in `folders`; a folder that is no run but holds some stands for them.

    >>> find_sources(["no/such/folder"])
    Traceback (most recent call last):
    ...
    asymgrpo.errors.UserError: no folder at no/such/folder
    """
    paths: dict[Path, Path] = {}
    for folder in map(Path, folders):
        for path in _runs_at(folder):
            paths.setdefault(path.resolve(), path)
    if not paths:
        raise UserError("name at least one run folder")
    names = _distinct_names(list(paths))
    found = [read_source(path, name) for path, name in zip(paths.values(), names, strict=True)]
    named = labels([{**run.record, "label": run.label} for run in found])
    return [replace(run, label=label) for run, label in zip(found, named, strict=True)]


def read_source(folder: Path, name: str | None = None) -> Source:
    """One run folder, ours or TRL's."""
    if (folder / RUN_FILE).is_file():
        return _read_own(folder, name or folder.resolve().name)
    state = state_file(folder)
    if state is None:
        raise UserError(f"{folder} is no run: it has neither {RUN_FILE} nor {STATE_FILE}")
    return _read_trl(folder, state, name or folder.resolve().name)


def state_file(folder: Path) -> Path | None:
    """The TRL log of a folder: at its top, else in its newest checkpoint."""
    if (folder / STATE_FILE).is_file():
        return folder / STATE_FILE
    saved = [path for path in folder.glob("checkpoint-*/" + STATE_FILE) if _step_of(path) >= 0]
    return max(saved, key=_step_of, default=None)


def _step_of(path: Path) -> int:
    number = path.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def _is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or state_file(folder) is not None


def _runs_at(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}")
    if _is_run(folder):
        return [folder]
    found = _runs_below(folder)
    if not found:
        raise UserError(
            f"{folder} is no run and holds none: neither it nor a folder below it has "
            f"{RUN_FILE} or {STATE_FILE}"
        )
    return found


def _runs_below(folder: Path) -> list[Path]:
    """Runs at any depth; what lies inside a run is its own."""
    children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [run for path in children for run in ([path] if _is_run(path) else _runs_below(path))]


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_own(folder: Path, name: str) -> Source:
    store = RunStore(folder)
    record = redacted(store.run())  # of an older version, which may have known fewer kinds
    label = base_label({"name": name} | record)
    seed = record.get("seed")
    return Source(
        folder=folder,
        name=name,
        label=label,
        kind="asymgrpo",
        seed=seed if isinstance(seed, int) else None,
        record=record,
        metrics=[our_names(row) for row in store.metrics()],
        evaluations=store.evaluations(),
    )


def _read_trl(folder: Path, path: Path, name: str) -> Source:
    try:
        state = read_json(path.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a trainer state ({error!r})") from None
    rows: dict[int, dict[str, Any]] = {}
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            rows.setdefault(entry["step"], {}).update(our_names(entry) | _quadrants(entry))
    found = SEED_SUFFIX.search(name)
    return Source(
        folder=folder,
        name=name,
        label=SEED_SUFFIX.sub("", name) or name,
        kind="trl",
        seed=int(found[1]) if found else None,
        record=redacted(_trl_record(folder, path, state)),
        metrics=[rows[step] for step in sorted(rows)],
        notes=_trl_notes(rows.values()),
    )


def our_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with TRL's metrics under our names as well; a name that is already ours wins.

    >>> our_names({"step": 3, "grad_norm": 2.0})
    {'step': 3, 'grad_norm': 2.0, 'gradient/norm': 2.0}
    """
    result = dict(row)
    for name, aliases in ALIASES.items():
        known = [row[alias] for alias in aliases if _is_number(row.get(alias))]
        if name not in result and known:
            result[name] = known[0]
    return result


def _quadrants(entry: Mapping[str, Any]) -> dict[str, float]:
    """Clip shares by quadrant, as far as a TRL log tells.

    TRL counts what its own clip cuts: high where A > 0 (Q1), low where A < 0 (Q3). The ABC-GRPO
    authors' trainer counts all four, as two shares and their split by the advantage's sign.
    """
    ppo, over = entry.get("clip_ratio/ppo_style"), entry.get("clip_ratio/overcorrection")
    if _is_number(ppo) and _is_number(over):
        split = {
            "clip/q1": (ppo, "ppo_style_pos"),
            "clip/q2": (over, "overcorrection_pos"),
            "clip/q3": (ppo, "ppo_style_neg"),
            "clip/q4": (over, "overcorrection_neg"),
        }
        return {
            name: share * entry[f"clip_ratio/{part}_adv_pct"]
            for name, (share, part) in split.items()
            if _is_number(entry.get(f"clip_ratio/{part}_adv_pct"))
        }
    names = {"clip/q1": "clip_ratio/high_mean", "clip/q3": "clip_ratio/low_mean"}
    return {ours: entry[trl] for ours, trl in names.items() if _is_number(entry.get(trl))}


def _trl_notes(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    measured = {name for row in rows for name in row}
    if "clip/q1" in measured and "clip/q4" not in measured:
        return ("TRL's log counts two of the four clip quadrants, Q1 and Q3",)
    return ()


def _trl_record(folder: Path, path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from the state itself and from the JSON files beside it; no pickle is opened."""
    names = ("max_steps", "num_train_epochs", "train_batch_size")
    config = {key: state[key] for key in names if state.get(key) is not None}
    steps: Any = state.get("global_step")
    last: Any = state.get("max_steps")
    done = _is_number(steps) and steps >= (last if _is_number(last) else 0)
    known = config | _first_rate(state.get("log_history")) | _adapter(folder, path.parent)
    return {
        "kind": "trl",
        "status": "finished" if done else "unfinished",
        "steps": steps,
        "config": known,
        **_model(folder, path.parent),
    }


def _first_rate(history: Any) -> dict[str, Any]:
    """The learning rate where it is first logged: a state says no more of its schedule."""
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict) and _is_number(entry.get("learning_rate")):
            return {f"learning_rate at step {entry.get('step')}": entry["learning_rate"]}
    return {}


def _adapter(*places: Path) -> dict[str, Any]:
    for place in places:
        rank = _json_field(place / "adapter_config.json", "r")
        if rank is not None:
            return {"lora": rank}
    return {}


def _model(*places: Path) -> dict[str, str]:
    for place in places:
        for file, key in (
            ("adapter_config.json", "base_model_name_or_path"),
            ("config.json", "_name_or_path"),
        ):
            model = _json_field(place / file, key)
            if model:
                return {"model": str(model)}
    return {}


def _json_field(path: Path, key: str) -> Any:
    try:
        data = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a file that may be there, and is only a nicety
    return data.get(key) if isinstance(data, dict) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
