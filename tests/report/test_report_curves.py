"""Means, bands, bins and distributions, against loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asymgrpo.report.curves import CHARTS, MAX_POINTS, chart_curves, curve_of
from asymgrpo.report.distributions import gradient_histograms, pass_curves, rollout_kl
from asymgrpo.report.settings import compare_settings
from asymgrpo.report.sources import Source
from asymgrpo.report.summary import compare_sources


def source(
    name: str,
    metrics: list[dict[str, Any]],
    label: str = "a",
    evaluations: list[dict[str, Any]] | None = None,
    record: dict[str, Any] | None = None,
) -> Source:
    return Source(Path(name), name, label, "asymgrpo", 0, record or {}, metrics, evaluations or [])


def test_mean_and_band_over_ragged_seeds() -> None:
    generator = np.random.default_rng(0)
    runs = []
    for seed in range(4):
        steps = sorted(generator.choice(np.arange(1, 60), 40, replace=False).tolist())
        rows = [{"step": step, "x": float(generator.normal())} for step in steps]
        runs.append(source(f"run{seed}", [*rows, {"step": 99}]))
    curve = curve_of("a", "x", runs)
    assert curve is not None
    values: dict[int, list[float]] = {}
    for run in runs:
        for row in run.metrics:
            if "x" in row:
                values.setdefault(row["step"], []).append(row["x"])
    assert curve.steps == sorted(values)
    for place, step in enumerate(curve.steps):
        own = values[int(step)]
        assert curve.mean[place] == pytest.approx(math.fsum(own) / len(own), rel=1e-12)
        assert (curve.low[place], curve.high[place]) == (min(own), max(own))
        assert curve.count[place] == len(own)
    assert curve_of("a", "never", runs) is None


def test_a_long_curve_is_averaged_in_bins() -> None:
    rows = [{"step": step, "x": float(step % 7)} for step in range(1, 5001)]
    curve = curve_of("a", "x", [source("run", rows)])
    assert curve is not None
    assert curve.bin == 5
    assert len(curve.steps) == MAX_POINTS
    for place in (0, 17, 999):
        inside = [row for row in rows if row["step"] in range(5 * place + 1, 5 * place + 6)]
        assert curve.steps[place] == np.mean([row["step"] for row in inside])
        assert curve.mean[place] == pytest.approx(np.mean([row["x"] for row in inside]))


def evaluation(step: int, right: list[int], ks: tuple[int, ...]) -> dict[str, Any]:
    """Problem i has `right[i]` of its 8 samples right."""
    problems = [{"id": i, "scores": [1.0] * n + [0.0] * (8 - n)} for i, n in enumerate(right)]
    value = {"value": float(np.mean(right)) / 8}
    return {"step": step, "k": list(ks), "problems": problems, "metrics": {"pass@1": value}}


def test_pass_at_k_before_and_after() -> None:
    ks = (1, 4)
    runs = [
        source(
            "r0", [],
            evaluations=[evaluation(0, [0, 2, 4], ks), evaluation(9, [4, 6, 8], (1, 4, 8))],
        ),
        source(
            "r1", [], evaluations=[evaluation(0, [1, 2, 4], ks), evaluation(9, [5, 6, 8], ks)]
        ),
        source("r2", [], label="b", evaluations=[evaluation(9, [4, 4, 4], (1,))]),
    ]  # fmt: skip
    comparison = compare_sources(runs)
    last, before = pass_curves(comparison)
    assert (last.label, last.moment, last.k) == ("a", "last", [1, 4])
    assert last.mean[0] == pytest.approx(np.mean([4, 6, 8, 5, 6, 8]) / 8)
    (held_out,) = [chart for chart in CHARTS if chart.key == "pass1"]
    curve, alone = chart_curves(held_out, runs, comparison)
    for ends in ("mean", "low", "high"):
        assert getattr(curve, ends)[-1] == getattr(last, ends)[0]
        assert getattr(curve, ends)[0] == getattr(before, ends)[0]
    assert before.moment == "before"
    assert (alone.low[0], alone.high[0]) == (
        comparison.labels[1].after.low,  # type: ignore[union-attr]
        comparison.labels[1].after.high,  # type: ignore[union-attr]
    )


def test_gradient_histograms_count_every_step() -> None:
    generator = np.random.default_rng(1)
    rows = [
        [
            {"step": i, "gradient/norm": float(v)}
            for i, v in enumerate(generator.lognormal(size=300))
        ]
        for _ in range(3)
    ]
    runs = [source("r0", rows[0]), source("r1", rows[1]), source("r2", rows[2], label="b")]
    a, b = gradient_histograms(runs)
    assert (a.steps, b.steps) == (600, 300)
    assert a.edges == b.edges
    for item, own in ((a, [*rows[0], *rows[1]]), (b, rows[2])):
        norms = [row["gradient/norm"] for row in own]
        for place, share in enumerate(item.share):
            low, high = item.edges[place], item.edges[place + 1]
            last = place == len(item.share) - 1
            inside = sum(low <= norm < high or (last and norm == high) for norm in norms)
            assert share == pytest.approx(inside / len(norms))
        assert sum(item.share) == pytest.approx(1)
    same = gradient_histograms([source("r", [{"step": 1, "gradient/norm": 0.5}])])
    assert sum(same[0].share) == 1
    assert gradient_histograms([source("r", [{"step": 1, "gradient/norm": 0.0}])]) == []


def test_rollout_kl_splits_by_sign_and_leaves_out_what_is_unknown() -> None:
    rows = [
        {"step": 4, "kl": 0.2, "advantage": -1.0},
        {"step": 2, "kl": 0.1, "advantage": 1.0},
        {"step": 3, "kl": None, "advantage": 1.0},
        {"step": 3, "kl": math.nan, "advantage": 0.0},
        {"step": 3, "kl": 0.3, "advantage": 0.0},
    ]
    found = rollout_kl([source("r", [])], {"r": rows})
    assert found == [
        {"label": "a", "sign": "positive", "steps": [2, 3], "kl": [0.1, 0.3]},
        {"label": "a", "sign": "negative", "steps": [4], "kl": [0.2]},
    ]


def test_settings_that_differ_are_told_from_those_that_do_not() -> None:
    def record(alpha: float, rate: float, seed: int) -> dict[str, Any]:
        return {
            "objective": {"horizon": {"alpha": alpha}, "kl": {"beta": 0.0}},
            "config": {"learning_rate": rate, "seed": seed, "output_dir": f"runs/{seed}"},
            "seed": seed,
            "model": "tiny",
        }

    runs = [
        source("r0", [], "a", record=record(0.0, 1e-4, 0)),
        source("r1", [], "a", record=record(0.0, 1e-3, 1)),
        source("r2", [], "b", record=record(0.5, 1e-4, 0) | {"device": "cpu"}),
    ]
    settings = compare_settings(runs)
    assert settings.labels == ["a", "b"]
    assert settings.differ == [
        ("config.learning_rate", ["0.0001 / 0.001", "0.0001"]),
        ("device", ["–", "cpu"]),
        ("objective.horizon.alpha", ["0.0", "0.5"]),
    ]
    assert settings.shared == [("model", "tiny"), ("objective.kl.beta", "0.0")]
