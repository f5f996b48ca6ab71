"""What the runs look like off the time axis: pass@k, gradient norms, KL by rollout."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asymgrpo.report.curves import labels_of
from asymgrpo.report.sources import Source

MAX_KL_POINTS = 1500
PASS = re.compile(r"^pass@(\d+)$")


@dataclass(frozen=True)
class PassCurve:
    """pass@k of one label at one moment, averaged over its runs."""

    label: str
    moment: str
    """"last" evaluation, or "before" training (step 0)."""
    k: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: int


@dataclass(frozen=True)
class Histogram:
    """Share of a label's steps whose gradient norm falls in each bin."""

    label: str
    edges: list[float]
    share: list[float]
    steps: int


def pass_curves(sources: Sequence[Source]) -> list[PassCurve]:
    """pass@k against k for every label, after training and, where it was measured, before it."""
    curves = []
    for label in labels_of(sources):
        runs = [run for run in sources if run.label == label and run.evaluations]
        last = [_pass_values(run.evaluations[-1]) for run in runs]
        first = [
            _pass_values(run.evaluations[0])
            for run in runs
            if run.evaluations[0]["step"] == 0 and len(run.evaluations) > 1
        ]
        for moment, tables in (("last", last), ("before", first)):
            curve = _pass_curve(label, moment, [table for table in tables if table])
            if curve is not None:
                curves.append(curve)
    return curves


def _pass_values(record: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for name, entry in record.get("metrics", {}).items():
        match = PASS.match(name)
        value = entry.get("value") if isinstance(entry, dict) else entry
        if match and isinstance(value, int | float):
            found[int(match[1])] = float(value)
    return found


def _pass_curve(label: str, moment: str, tables: list[dict[int, float]]) -> PassCurve | None:
    if not tables:
        return None
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    if len(shared) < 2:  # one k is a number, not a curve; it stands in the table
        return None
    values = np.array([[table[k] for k in shared] for table in tables])
    return PassCurve(
        label=label,
        moment=moment,
        k=shared,
        mean=values.mean(0).tolist(),
        low=values.min(0).tolist(),
        high=values.max(0).tolist(),
        runs=len(tables),
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
