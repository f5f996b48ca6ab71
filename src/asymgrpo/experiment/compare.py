"""Compares runs: who is better, by how much, and how sure that is. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asymgrpo.errors import UserError
from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.comparison import (
    Comparison,
    CurvePoint,
    LabelSummary,
    PairResult,
    RunData,
    Variance,
    table_rows,
)
from asymgrpo.experiment.curves import (
    MIN_SEEDS,
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
from asymgrpo.experiment.scores import (
    Evaluated,
    Scores,
    aligned,
    aligned_families,
    evaluated_runs,
)
from asymgrpo.experiment.statistics import over_seeds_and_problems
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
        finals = aligned([run.final for run in evaluated[baseline]], 1)
        target = float(finals.mean()) if finals.size else None
    variances = _Variances(by_label, evaluated, baseline)
    labels = tuple(
        _summary(label, members, evaluated[label], variances, target)
        for label, members in by_label.items()
    )
    pairs = compare_pairs(evaluated)
    columns = {s.cluster for runs in evaluated.values() for r in runs for s in r.evaluations}
    cluster = next((column for column in columns if column), None)
    return Comparison(headline(labels, pairs, baseline), labels, pairs, baseline, target, cluster)


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
        own, other = self.finals[label], self.finals[self.baseline]
        ratio = variance_ratio(own, other)
        if ratio is not None:
            return Variance(estimate, ratio)
        few = min(len(own), len(other)) < MIN_SEEDS
        return Variance(
            estimate, None, f"fewer than {MIN_SEEDS} seeds: no ratio" if few else "no spread"
        )

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
        if base is None or value <= 0 or base[0] <= 0 or not (base[1] > 0).all():
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
    after = _at_k([run.final for run in evaluated])
    before = _at_k([run.first for run in evaluated if run.first is not None])
    curve = _curve(evaluated)
    return LabelSummary(
        label=label,
        algorithm=runs[0].algorithm,
        seeds=tuple(run.seed for run in runs),
        before=before.get(1),
        after=after.get(1),
        gain=_gain(evaluated),
        peak=_rate([run.peak for run in evaluated], 1) if evaluated else None,
        pass_at_k=after,
        before_at_k=before,
        curve=curve,
        reward_variance=variances.raw(label),
        detrended_variance=variances.detrended(label),
        seed_variance=variances.over_seeds(label),
        entropy_end=mean_over_seeds(ends),
        collapse_step=majority_median(collapses),
        collapsed=sum(step is not None for step in collapses),
        steps_to_target=_first_step_at(target, curve, len(evaluated)),
        reached=sum(step is not None for step in reached),
        quadrants=quadrants(runs),
        seconds=mean_seconds([run.run for run in runs]),
        notes=_notes(runs, evaluated),
    )


def _rate(scores: Sequence[Scores], k: int) -> Estimate | None:
    """The mean pass@k of one evaluation of each run, with its interval over seeds and problems."""
    values = aligned(scores, k)
    return over_seeds_and_problems(values, 0.0, aligned_families(scores)) if values.size else None


def _at_k(scores: Sequence[Scores]) -> dict[int, Estimate]:
    """pass@k of one evaluation of each run, for every k that all of them have."""
    if not scores:
        return {}
    ks = sorted(set.intersection(*(set(s.ks) for s in scores)) | {1})
    rates = {k: _rate(scores, k) for k in ks}
    return {k: rate for k, rate in rates.items() if rate is not None}


def _curve(evaluated: Sequence[Evaluated]) -> tuple[CurvePoint, ...]:
    by_step: dict[int, list[Scores]] = {}
    for run in evaluated:
        for scores in run.evaluations:
            by_step.setdefault(scores.step, []).append(scores)
    rates = {step: _rate(scores, 1) for step, scores in sorted(by_step.items())}
    return tuple(
        CurvePoint(step, rate, len(by_step[step]))
        for step, rate in rates.items()
        if rate is not None
    )


def _first_step_at(target: float | None, curve: Sequence[CurvePoint], runs: int) -> float | None:
    """The first step at which the mean over all runs is at the target, up to rounding."""
    reached = (
        float(point.step)
        for point in curve
        if target is not None and point.runs == runs and point.estimate.value >= target - 1e-9
    )
    return next(reached, None)


def _gain(evaluated: Sequence[Evaluated]) -> Estimate | None:
    """pass@1 gained from step 0 to the end."""
    both = [(run.first, run.final) for run in evaluated if run.first and run.final.step > 0]
    if not both:
        return None
    picked = [*(final for _, final in both), *(first for first, _ in both if first)]
    values = aligned(picked, 1)
    if values.shape[1] < 2:
        return None
    gained = values[: len(both)] - values[len(both) :]
    return over_seeds_and_problems(gained, -1.0, aligned_families(picked))


def _notes(runs: Sequence[RunData], evaluated: Sequence[Evaluated]) -> tuple[str, ...]:
    notes = []
    unfinished = sum(run.run.get("status", "finished") != "finished" for run in runs)
    if unfinished:
        notes.append(f"{unfinished} of {len(runs)} runs not finished")
    if 0 < len(evaluated) < len(runs):
        notes.append(f"{len(runs) - len(evaluated)} of {len(runs)} runs not evaluated")
    builds = {str(sorted((run.run.get("versions") or {}).items())) for run in runs}
    if len(builds) > 1:
        notes.append("runs by different versions of the libraries")
    machines = {str(sorted(known.items())) for run in runs if (known := run.run.get("machine"))}
    if len(machines) > 1:
        notes.append("runs on different machines, threads or code")
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        notes.append("several runs of one seed; pairs take the last of them")
    return tuple(notes)
