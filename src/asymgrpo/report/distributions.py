"""What the runs look like off the time axis: pass@k, gradient norms, KL by rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asymgrpo.evaluation.intervals import Estimate
from asymgrpo.experiment.comparison import Comparison
from asymgrpo.report.curves import labels_of
from asymgrpo.report.sources import Source

MAX_KL_POINTS = 1500


@dataclass(frozen=True)
class PassCurve:
    """pass@k of one label at one moment, with the comparison's intervals."""

    label: str
    moment: str
    """"last" evaluation, or "before" training (step 0)."""
    k: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Histogram:
    """Share of a label's steps whose gradient norm falls in each bin."""

    label: str
    edges: list[float]
    share: list[float]
    steps: int


def pass_curves(comparison: Comparison) -> list[PassCurve]:
    """pass@k against k for every label, after training and, where it was measured, before it."""
    found = []
    for summary in comparison.labels:
        trained = any(point.step > 0 for point in summary.curve)
        moments = {"last": summary.pass_at_k, "before": summary.before_at_k if trained else {}}
        for moment, rates in moments.items():
            if len(rates) > 1:  # one k is a number, not a curve; it stands in the table
                found.append(_pass_curve(summary.label, moment, rates))
    return found


def _pass_curve(label: str, moment: str, rates: Mapping[int, Estimate]) -> PassCurve:
    ordered = [rates[k] for k in sorted(rates)]
    return PassCurve(
        label=label,
        moment=moment,
        k=sorted(rates),
        mean=[rate.value for rate in ordered],
        low=[rate.value if rate.low is None else rate.low for rate in ordered],
        high=[rate.value if rate.high is None else rate.high for rate in ordered],
    )


def gradient_histograms(sources: Sequence[Source], bins: int = 40) -> list[Histogram]:
    """Gradient norms of all steps and seeds of a label, in bins that all labels share."""
    norms: dict[str, list[float]] = {}
    for run in sources:
        positive = [value for value in run.series("gradient/norm")[1] if value > 0]
        norms.setdefault(run.label, []).extend(positive)
    everything = [value for values in norms.values() for value in values]
    if not everything:
        return []
    low, high = min(everything), max(everything)
    if low == high:
        low, high = low / 1.5, high * 1.5
    edges = np.geomspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high  # rounding must not push the extremes out
    return [
        Histogram(
            label=label,
            edges=edges.tolist(),
            share=(np.histogram(norms[label], edges)[0] / len(norms[label])).tolist(),
            steps=len(norms[label]),
        )
        for label in labels_of(sources)
        if norms.get(label)
    ]


def rollout_kl(
    sources: Sequence[Source], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """KL of single rollouts by label and sign of the advantage, from the rollouts in `rows`."""
    result = []
    budget = MAX_KL_POINTS // max(1, len(labels_of(sources)))
    for label in labels_of(sources):
        own = [row for run in sources if run.label == label for row in rows.get(run.name, ())]
        for sign in ("positive", "negative"):
            points = [
                (row["step"], row["kl"])
                for row in own
                if _known(row.get("kl")) and (sign == "negative") == is_negative(row)
            ]
            points = points[:: max(1, math.ceil(2 * len(points) / budget))]
            if points:
                steps, values = zip(*sorted(points), strict=True)
                result.append(
                    {"label": label, "sign": sign, "steps": list(steps), "kl": list(values)}
                )
    return result


def is_negative(row: Mapping[str, Any]) -> bool:
    """Whether a rollout counts as failed: its advantage is below 0."""
    advantage = row.get("advantage")
    return isinstance(advantage, float) and advantage < 0


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
