"""Charts as plain data for the page's script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asymgrpo.experiment.comparison import Comparison
from asymgrpo.report.curves import CHARTS, Chart, Curve, chart_curves
from asymgrpo.report.distributions import gradient_histograms, pass_curves, rollout_kl
from asymgrpo.report.rollouts import rounded
from asymgrpo.report.sources import Source


def line_charts(
    sources: Sequence[Source], comparison: Comparison | None = None
) -> list[dict[str, Any]]:
    """Every chart over steps of which some run has a point."""
    found = []
    for chart in CHARTS:
        curves = chart_curves(chart, sources, comparison)
        if curves:
            found.append(
                {
                    "kind": "line",
                    "key": chart.key,
                    "title": chart.title,
                    "hint": chart.hint,
                    "section": chart.section,
                    "log": chart.log,
                    "percent": chart.percent,
                    "curves": [_pack_curve(chart, curve) for curve in curves],
                }
            )
    return found


def _pack_curve(chart: Chart, curve: Curve) -> dict[str, Any]:
    part = chart.metrics.index(curve.metric)
    packed: dict[str, Any] = {
        "label": curve.label,
        "metric": curve.metric,
        "part": part,
        "name": chart.names[part] if chart.names else "",
        "x": numbers(curve.steps),
        "y": numbers(curve.mean),
        "bin": curve.bin,
    }
    if len(curve.runs) > 1 or curve.interval:
        packed |= {"low": numbers(curve.low), "high": numbers(curve.high)}
    if len(curve.runs) > 1:
        packed["n"] = curve.count
        packed["runs"] = [
            {"name": name, "y": numbers(values)}
            | ({} if steps == curve.steps else {"x": numbers(steps)})
            for name, (steps, values) in curve.runs.items()
        ]
    return packed


def distribution_charts(
    sources: Sequence[Source],
    rollouts: dict[str, list[dict[str, Any]]],
    comparison: Comparison,
) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = []
    common = {"section": "distributions", "log": False, "percent": True}
    passes = [
        vars(curve) | {part: numbers(getattr(curve, part)) for part in ("mean", "low", "high")}
        for curve in pass_curves(comparison)
    ]
    if passes:
        hint = "last evaluation; dashed: before training; band: 95 % interval as in the table"
        charts.append(
            common
            | {"kind": "pass", "key": "passk", "title": "pass@k", "hint": hint, "curves": passes}
            | {"xTitle": "k"}
        )
    histograms = [
        vars(item) | {"edges": numbers(item.edges), "share": numbers(item.share)}
        for item in gradient_histograms(sources)
    ]
    if histograms:
        charts.append(
            common
            | {"kind": "histogram", "key": "gradient-histogram", "curves": histograms}
            | {"title": "Gradient norms", "hint": "share of steps, all seeds; both tails matter"}
            | {"xTitle": "gradient norm"}
        )
    kl = [item | {"kl": numbers(item["kl"])} for item in rollout_kl(sources, rollouts)]
    if kl:
        hint = "to the reference, else to the sampling policy; ○ A ≥ 0, × A < 0"
        charts.append(
            common
            | {"kind": "kl", "key": "kl-rollouts", "title": "KL by rollout", "hint": hint}
            | {"curves": kl, "percent": False}
        )
    return charts


def numbers(values: Iterable[float]) -> list[int | float | None]:
    return [rounded(value) for value in values]
