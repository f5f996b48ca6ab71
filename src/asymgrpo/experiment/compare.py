"""Compares runs: who is better, by how much, and how sure that is. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from asymgrpo.experiment.comparison import Comparison, RunData
from asymgrpo.experiment.store import RunStore


def load_runs(folders: Iterable[str | Path]) -> list[RunData]:
    """The runs in `folders`, one each.

    >>> load_runs([])
    []
    """
    return [_load(RunStore(folder)) for folder in folders]


def _load(store: RunStore) -> RunData:
    record = store.run()
    algorithm = record.get("algorithm")
    seed = record.get("seed")
    return RunData(
        label=str(record.get("label") or algorithm or store.name),
        algorithm=algorithm,
        seed=seed if isinstance(seed, int) else None,
        run=record,
        metrics=store.metrics(),
        evaluations=store.evaluations(),
    )


def compare_runs(
    runs: Sequence[RunData], *, baseline: str | None = None, target: float | None = None
) -> Comparison:
    """Summaries by label and verdicts by pair."""
    raise NotImplementedError
