"""Curves over steps: a line a label, its band over seeds; one list of charts for page and paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asymgrpo.experiment.comparison import Comparison
from asymgrpo.report.sources import Source

PASS = "evaluation/pass@1"
MAX_POINTS = 1000
"""Points of a curve at most; longer ones are averaged in bins of equal width."""


@dataclass(frozen=True)
class Chart:
    """What one chart shows."""

    key: str
    title: str
    metrics: tuple[str, ...]
    """One line a label; a second metric is drawn dashed."""
    hint: str
    section: str
    log: bool = False
    percent: bool = False
    names: tuple[str, ...] = ()
    """What to call each of several metrics."""


CHARTS = (
    Chart("reward", "Training reward", ("reward/mean",), "mean of the batch", "learning"),
    Chart(
        "pass1",
        "Held-out pass@1",
        (PASS,),
        "problems that training never sees; band: 95 % interval as in the table",
        "learning",
        percent=True,
    ),
    Chart(
        "evaluation-reward",
        "Held-out reward",
        ("evaluation/reward",),
        "the trainer's own evaluation",
        "learning",
    ),
    Chart(
        "entropy-sign",
        "Entropy by sign of the rollout",
        ("entropy/positive", "entropy/negative"),
        "nats a token",
        "learning",
        names=("positive", "negative"),
    ),
    Chart("entropy", "Entropy", ("entropy/mean",), "nats a token; near 0 is collapse", "learning"),
    Chart(
        "horizon",
        "Effective horizon",
        ("horizon/effective",),
        "share of a discounted rollout that still counts",
        "learning",
        percent=True,
    ),
    Chart(
        "removed",
        "Negative mass removed",
        ("horizon/removed",),
        "share that the discount takes from the negative surrogate",
        "learning",
        percent=True,
    ),
    Chart("gradient", "Gradient norm", ("gradient/norm",), "log scale", "learning", log=True),
    Chart("kl", "KL to the reference", ("kl/mean",), "nats a token", "learning"),
    Chart("length", "Completion length", ("length/mean",), "tokens", "learning"),
    Chart(
        "truncated",
        "Cut off at the limit",
        ("length/truncated",),
        "share of completions",
        "learning",
        percent=True,
    ),
    Chart(
        "zero-variance",
        "Groups without a signal",
        ("reward/zero_variance_groups",),
        "share of groups whose rewards are all equal",
        "learning",
        percent=True,
    ),
    Chart(
        "q2", "Q2 · A > 0, ratio low", ("clip/q2",), "share of tokens", "quadrants", percent=True
    ),
    Chart(
        "q1", "Q1 · A > 0, ratio high", ("clip/q1",), "share of tokens", "quadrants", percent=True
    ),
    Chart(
        "q3", "Q3 · A < 0, ratio low", ("clip/q3",), "share of tokens", "quadrants", percent=True
    ),
    Chart(
        "q4", "Q4 · A < 0, ratio high", ("clip/q4",), "share of tokens", "quadrants", percent=True
    ),
    Chart(
        "time",
        "Seconds a step",
        ("time/rollout", "time/update"),
        "sampling and updating",
        "cost",
        names=("rollout", "update"),
    ),
    Chart("step-time", "Seconds a step", ("time/step",), "as the trainer logs it", "cost"),
    Chart("speed", "Tokens a second", ("tokens_per_second",), "", "cost"),
)


@dataclass(frozen=True)
class Curve:
    """One metric of one label: the mean over its runs, and the lowest and highest of them.

    Of the held-out pass@1 `low` and `high` are the ends of the comparison's interval.
    """

    label: str
    metric: str
    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    count: list[int]
    """Runs behind each point."""
    runs: dict[str, tuple[list[float], list[float]]]
    """Each run's own points, by its name."""
    bin: int = 1
    """Steps averaged into a point."""
    interval: bool = False
    """Whether `low` and `high` are the ends of an interval."""


def labels_of(sources: Iterable[Source]) -> list[str]:
    """Labels in the order of the runs."""
    return list(dict.fromkeys(source.label for source in sources))


def chart_curves(
    chart: Chart, sources: Sequence[Source], comparison: Comparison | None = None
) -> list[Curve]:
    """The curves of a chart; a label whose runs never measured it has none."""
    found = []
    for label in labels_of(sources):
        for metric in chart.metrics:
            curve = curve_of(label, metric, [run for run in sources if run.label == label])
            if curve is not None:
                found.append(_with_intervals(curve, comparison) if metric == PASS else curve)
    return found


def _with_intervals(curve: Curve, comparison: Comparison | None) -> Curve:
    """The held-out curve as the table has it: means and intervals of the comparison."""
    summaries = comparison.labels if comparison is not None else ()
    points = [point for s in summaries if s.label == curve.label for point in s.curve]
    if [float(point.step) for point in points] != curve.steps:
        return curve
    estimates = [point.estimate for point in points]
    return replace(
        curve,
        mean=[e.value for e in estimates],
        low=[e.value if e.low is None else e.low for e in estimates],
        high=[e.value if e.high is None else e.high for e in estimates],
        interval=True,
    )


def curve_of(label: str, metric: str, runs: Sequence[Source]) -> Curve | None:
    series = {run.name: points(run, metric) for run in runs}
    series = {name: pair for name, pair in series.items() if pair[0]}
    if not series:
        return None
    every = sorted({step for steps, _ in series.values() for step in steps})
    width = bin_width(every)
    binned = {name: average_bins(*pair, width) for name, pair in series.items()}
    steps = sorted({step for own, _ in binned.values() for step in own})
    place = {step: index for index, step in enumerate(steps)}
    table = np.full((len(binned), len(steps)), np.nan)
    for row, (own, values) in enumerate(binned.values()):
        table[row, [place[step] for step in own]] = values
    return Curve(
        label=label,
        metric=metric,
        steps=steps,
        mean=np.nanmean(table, axis=0).tolist(),
        low=np.nanmin(table, axis=0).tolist(),
        high=np.nanmax(table, axis=0).tolist(),
        count=np.sum(~np.isnan(table), axis=0).tolist(),
        runs=binned,
        bin=width,
    )


def points(run: Source, metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, of training or of an evaluation (`evaluation/pass@1`)."""
    if metric.startswith("evaluation/") and run.evaluations:
        return evaluation_points(run, metric.removeprefix("evaluation/"))
    steps, values = run.series(metric)
    return [float(step) for step in steps], values


def evaluation_points(run: Source, metric: str) -> tuple[list[float], list[float]]:
    pairs = []
    for record in run.evaluations:
        entry = record.get("metrics", {}).get(metric)
        value = entry.get("value") if isinstance(entry, dict) else entry
        if isinstance(value, int | float):
            pairs.append((float(record["step"]), float(value)))
    return [step for step, _ in pairs], [value for _, value in pairs]


def bin_width(steps: Sequence[float]) -> int:
    """Steps to average into a point so that no more than `MAX_POINTS` are left.

    >>> bin_width(range(1, 201)), bin_width(range(1, 5001))
    (1, 5)
    """
    if len(steps) <= MAX_POINTS:
        return 1
    return int(-(-(steps[-1] - steps[0] + 1) // MAX_POINTS))


def average_bins(
    steps: Sequence[float], values: Sequence[float], width: int
) -> tuple[list[float], list[float]]:
    """Means over bins of `width` steps; a bin stands at the middle of its steps.

    >>> average_bins([1, 2, 3, 4], [1.0, 3.0, 5.0, 9.0], 2)
    ([1.5, 3.5], [2.0, 7.0])
    """
    if width == 1:
        return [float(step) for step in steps], [float(value) for value in values]
    bins: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        bins.setdefault(int((step - 1) // width), []).append(value)
    centres = [index * width + 1 + (width - 1) / 2 for index in bins]
    return centres, [float(np.mean(values)) for values in bins.values()]
