"""Compares runs: who is better, by how much, and how sure that is. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asymgrpo.errors import UserError
from asymgrpo.evaluation.intervals import Estimate, bootstrap_means
from asymgrpo.experiment.comparison import (
    Comparison,
    LabelSummary,
    PairResult,
    RunData,
    Variance,
    table_rows,
)
from asymgrpo.experiment.curves import (
    REWARD,
    RewardVariance,
    collapse_step,
    entropy_end,
    majority_median,
    mean_over_seeds,
    mean_seconds,
    percentile_estimate,
    pivotal_estimate,
    pooled_draws,
    quadrants,
    reward_variance,
    seed_variance,
    series,
    variance_ratio,
)
from asymgrpo.experiment.headline import headline
from asymgrpo.experiment.identity import labels
from asymgrpo.experiment.pairs import compare_pairs
from asymgrpo.experiment.scores import Evaluated, aligned, evaluated_runs
from asymgrpo.experiment.statistics import paired_bootstrap
from asymgrpo.experiment.store import RunStore

__all__ = [
    "Comparison",
    "LabelSummary",
    "PairResult",
    "RunData",
    "compare_runs",
    "load_runs",
    "table_rows",
]


def load_runs(folders: Iterable[str | Path]) -> list[RunData]:
    """The runs in `folders`, one each.

    >>> load_runs([])
    []
    """
    stores = [RunStore(folder) for folder in folders]
    records = [{"name": store.name, **store.run()} for store in stores]
    return [_load(*found) for found in zip(stores, records, labels(records), strict=True)]


def _load(store: RunStore, record: Mapping[str, Any], label: str) -> RunData:
    seed = record.get("seed")
    return RunData(
        label=label,
        algorithm=record.get("algorithm"),
        seed=seed if isinstance(seed, int) else None,
        run=record,
        metrics=store.metrics(),
        evaluations=store.evaluations(),
    )


def compare_runs(
    runs: Sequence[RunData], *, baseline: str | None = None, target: float | None = None
) -> Comparison:
    """Summaries by label and verdicts by pair; what the runs did not measure is None.

    `baseline` is the label that ratios refer to, GRPO's by default. `target` is the pass@1 of
    `steps_to_target`, the baseline's final one by default.

    >>> log = [{"step": step, "reward": 0.5 + 0.01 * step} for step in range(1, 11)]
    >>> found = compare_runs([RunData("grpo", "grpo", 0, metrics=log)])
    >>> found.baseline, found.labels[0].after
    ('grpo', None)
    """
    by_label = _grouped(runs, baseline)
    baseline = baseline or _default_baseline(by_label)
    if baseline is not None:
        by_label = {baseline: by_label[baseline], **by_label}
    evaluated = {label: evaluated_runs(members) for label, members in by_label.items()}
    if target is None and baseline is not None and evaluated[baseline]:
        target = float(np.mean([run.final.pass_at_1 for run in evaluated[baseline]]))
    variances = _Variances(by_label, evaluated, baseline)
    labels = tuple(
        _summary(label, members, evaluated[label], variances, target)
        for label, members in by_label.items()
    )
    pairs = compare_pairs(evaluated)
    return Comparison(headline(labels, pairs, baseline), labels, pairs, baseline, target)


def _grouped(runs: Sequence[RunData], baseline: str | None) -> dict[str, list[RunData]]:
    by_label: dict[str, list[RunData]] = {}
    for run in runs:
        by_label.setdefault(run.label, []).append(run)
    if baseline is not None and baseline not in by_label:
        raise UserError(f"no run is labelled {baseline!r}; there are: {', '.join(by_label)}")
    return by_label


def _default_baseline(by_label: Mapping[str, Sequence[RunData]]) -> str | None:
    if "grpo" in by_label:
        return "grpo"
    plain = [label for label, runs in by_label.items() if runs[0].algorithm == "grpo"]
    return plain[0] if plain else None


class _Variances:
    """Training variance of every label under its three names, and the ratio to the baseline."""

    def __init__(
        self,
        by_label: Mapping[str, Sequence[RunData]],
        evaluated: Mapping[str, Sequence[Evaluated]],
        baseline: str | None,
    ):
        self.baseline = baseline
        self.finals = {
            label: [run.final.pass_at_1 for run in runs] for label, runs in evaluated.items()
        }
        numbered = ((label, run) for label, runs in by_label.items() for run in runs)
        self.rewards: dict[str, list[RewardVariance]] = {label: [] for label in by_label}
        for number, (label, run) in enumerate(numbered):
            found = reward_variance(series(run, REWARD)[1], draw_seed=number)
            if found is not None:
                self.rewards[label].append(found)

    def raw(self, label: str) -> Variance | None:
        found = self._over_steps(label, detrended=False)
        if found is None:
            return None
        value, draws = found
        ratio = self._ratio(label, value, draws, detrended=False)
        return Variance(percentile_estimate(value, draws), ratio)

    def detrended(self, label: str) -> Variance | None:
        found = self._over_steps(label, detrended=True)
        if found is None:
            return None
        value, draws = found
        ratio = self._ratio(label, value, draws, detrended=True)
        return Variance(pivotal_estimate(value, draws), ratio)

    def over_seeds(self, label: str) -> Variance | None:
        estimate = seed_variance(self.finals[label])
        if estimate is None:
            return None
        if self.baseline is None or label == self.baseline:
            return Variance(estimate, None)
        return Variance(estimate, variance_ratio(self.finals[label], self.finals[self.baseline]))

    def _over_steps(self, label: str, *, detrended: bool) -> tuple[float, np.ndarray] | None:
        runs = self.rewards[label]
        if not runs:
            return None
        if detrended:
            value = np.mean([run.detrended for run in runs])
            return float(value), pooled_draws([run.detrended_draws for run in runs])
        value = np.mean([run.raw for run in runs])
        return float(value), pooled_draws([run.raw_draws for run in runs])

    def _ratio(
        self, label: str, value: float, draws: np.ndarray, *, detrended: bool
    ) -> Estimate | None:
        if self.baseline is None or label == self.baseline:
            return None
        base = self._over_steps(self.baseline, detrended=detrended)
        if base is None or base[0] <= 0 or not (base[1] > 0).all():
            return None
        return pivotal_estimate(value / base[0], draws / base[1])


def _summary(
    label: str,
    runs: Sequence[RunData],
    evaluated: Sequence[Evaluated],
    variances: _Variances,
    target: float | None,
) -> LabelSummary:
    collapses = [collapse_step(run) for run in runs]
    reached = [run.first_step_at(target) for run in evaluated] if target is not None else []
    ends = [end for run in runs if (end := entropy_end(run)) is not None]
    gain, gain_over_seeds = _gain(evaluated)
    finals = [run.final for run in evaluated]
    ks = sorted(set.intersection(*(set(s.ks) for s in finals)) | {1}) if finals else []
    final = {k: _over_problems(aligned(finals, k)) for k in ks}
    firsts = [run.first for run in evaluated if run.first is not None]
    return LabelSummary(
        label=label,
        algorithm=runs[0].algorithm,
        seeds=tuple(run.seed for run in runs),
        before=_over_problems(aligned(firsts, 1)) if firsts else None,
        after=final.get(1),
        gain=gain,
        gain_over_seeds=gain_over_seeds,
        peak=_over_problems(aligned([run.peak for run in evaluated], 1)) if evaluated else None,
        pass_at_k={k: estimate for k, estimate in final.items() if estimate is not None},
        reward_variance=variances.raw(label),
        detrended_variance=variances.detrended(label),
        seed_variance=variances.over_seeds(label),
        entropy_end=mean_over_seeds(ends),
        collapse_step=majority_median(collapses),
        collapsed=sum(step is not None for step in collapses),
        steps_to_target=majority_median(reached),
        reached=sum(step is not None for step in reached),
        quadrants=quadrants(runs),
        seconds=mean_seconds([run.run for run in runs]),
        notes=_notes(runs, evaluated),
    )


def _over_problems(values: np.ndarray) -> Estimate | None:
    """The mean of [S, P], with an interval over problems."""
    if not values.size:
        return None
    mean, low, high = bootstrap_means(values.mean(axis=0)[:, None])
    return Estimate(float(mean[0]), float(low[0]), float(high[0]))


def _gain(evaluated: Sequence[Evaluated]) -> tuple[Estimate | None, Estimate | None]:
    """pass@1 gained from step 0 to the end: over problems, and over problems and seeds."""
    both = [(run.first, run.final) for run in evaluated if run.first and run.final.step > 0]
    if not both:
        return None, None
    values = aligned([*(final for _, final in both), *(first for first, _ in both if first)], 1)
    if values.shape[1] < 2:
        return None, None
    gains = values[: len(both)] - values[len(both) :]
    return (
        _bootstrapped(gains.mean(axis=0, keepdims=True)),
        _bootstrapped(gains) if len(both) > 1 else None,
    )


def _bootstrapped(differences: np.ndarray) -> Estimate:
    found = paired_bootstrap(differences[None])
    return Estimate(float(found.mean[0]), float(found.low[0]), float(found.high[0]))


def _notes(runs: Sequence[RunData], evaluated: Sequence[Evaluated]) -> tuple[str, ...]:
    notes = []
    unfinished = sum(run.run.get("status", "finished") != "finished" for run in runs)
    if unfinished:
        notes.append(f"{unfinished} of {len(runs)} runs not finished")
    if 0 < len(evaluated) < len(runs):
        notes.append(f"{len(runs) - len(evaluated)} of {len(runs)} runs not evaluated")
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        notes.append("several runs of one seed; pairs take the last of them")
    return tuple(notes)
