"""One interval for the table, the curves, the page and the JSON, and the verdict agrees with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.experiment.compare import compare_runs, load_runs, table_rows
from asymgrpo.experiment.comparison import RunData
from asymgrpo.experiment.statistics import holm, judged_levels, over_seeds_and_problems
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.summary import summarise

DIFFICULTY = np.random.default_rng(11).beta(1.5, 1.5, size=120)


def run(label: str, seed: int, rates: dict[int, float], **record: Any) -> RunData:
    """A run whose pass@1 at each step is about the rate, on problems of unlike difficulty."""
    rng = np.random.default_rng([seed, len(label), 3])
    evaluations = []
    for step, rate in rates.items():
        chance = np.clip(DIFFICULTY + rate - DIFFICULTY.mean(), 0, 1)
        right = rng.binomial(4, chance)
        problems = [
            {"id": i, "scores": [1.0] * int(n) + [0.0] * int(4 - n)} for i, n in enumerate(right)
        ]
        evaluations.append({"step": step, "k": [1, 2, 4], "problems": problems, "metrics": {}})
    metrics = [
        {"step": i, "reward/mean": float(rng.random()), "entropy/mean": 0.1 + 0.3 * seed}
        for i in range(1, 20)
    ]
    return RunData(label, label, seed, record, metrics, evaluations)


def two_seeds() -> list[RunData]:
    """As in the demo: two seeds whose finals differ, and an algorithm somewhat below."""
    return [
        run("grpo", 0, {0: 0.5, 8: 0.8, 16: 0.89}),
        run("grpo", 1, {0: 0.5, 8: 0.8, 16: 0.93}),
        run("abc-grpo", 0, {0: 0.5, 8: 0.7, 16: 0.80}),
        run("abc-grpo", 1, {0: 0.5, 8: 0.7, 16: 0.84}),
    ]


def test_intervals_overlap_where_no_difference_is_established() -> None:
    comparison = compare_runs(two_seeds())
    grpo, other = comparison.labels
    assert comparison.pair("abc-grpo", "grpo").verdict == "inconclusive"
    assert other.after is not None
    assert grpo.after is not None
    assert (other.after.high or 0) > (grpo.after.low or 1)
    assert comparison.intervals == (
        "Means over seeds, with 95 % intervals over seeds and problems."
    )


def test_a_difference_of_rates_lies_within_1() -> None:
    """Two seeds that disagree, and several pairs to correct for: the draws go far beyond."""
    rates = {"grpo": (0.9, 0.9), "ah-grpo": (0.9, 0.3), "abc-grpo": (0.2, 0.9)}
    runs = [run(name, seed, {0: 0.5, 8: r[seed]}) for name, r in rates.items() for seed in (0, 1)]
    ends = [(p.difference.low, p.difference.high) for p in compare_runs(runs).pairs if p.difference]
    assert (-1.0, 1.0) in ends
    assert all(
        low is not None and high is not None and -1 <= low <= high <= 1 for low, high in ends
    )


def test_the_interval_holds_the_truth_over_seeds_and_problems() -> None:
    rng, held, worlds = np.random.default_rng(5), 0, 300
    for _ in range(worlds):
        difficulty = rng.beta(2, 2, size=60)
        luck = rng.normal(0, 0.05, size=(3, 1))
        values = rng.binomial(4, np.clip(difficulty + luck, 0, 1)) / 4
        found = over_seeds_and_problems(values, 0.0)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.5 <= found.high
    assert held / worlds > 0.92  # of problems alone it would be some 0.7


def test_one_seed_is_measured_over_problems_and_the_caption_says_so() -> None:
    comparison = compare_runs(two_seeds()[::2])
    assert "over problems; one seed" in comparison.intervals
    mixed = compare_runs(two_seeds()[:3])
    assert mixed.intervals.endswith("over problems alone where there is one seed.")


@pytest.mark.parametrize("world", range(12))
def test_an_interval_leaves_out_zero_just_where_there_is_a_verdict(world: int) -> None:
    rng = np.random.default_rng(world)
    runs = [
        run(label + "x" * world, seed, {0: 0.4, 9: float(rate + rng.normal(0, 0.01))})
        for label, rate in zip("abcd", 0.5 + 0.08 * rng.random(4), strict=True)
        for seed in range(4)
    ]
    for pair in compare_runs(runs).pairs:
        assert pair.difference is not None
        assert pair.difference.low is not None
        assert pair.difference.high is not None
        outside = not pair.difference.low <= 0 <= pair.difference.high
        assert outside == (pair.verdict != "inconclusive"), (pair.metric, pair.p_holm)


def test_holms_levels_and_p_values_give_the_same_verdicts() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        p_values = (rng.random(5) ** 3).tolist()
        levels = judged_levels(p_values)
        assert [p < 0.05 for p in holm(p_values)] == [
            p < level for p, level in zip(p_values, levels, strict=True)
        ]


def test_the_label_that_sets_the_target_reaches_it() -> None:
    """Though one of its two seeds stays below their mean."""
    grpo = compare_runs(two_seeds()).labels[0]
    assert grpo.steps_to_target == 16.0
    assert grpo.reached == 1


def test_spreads_over_seeds_say_only_what_few_seeds_can() -> None:
    grpo, other = compare_runs(two_seeds()).labels
    assert grpo.entropy_end is not None
    assert (grpo.entropy_end.low or 0) > 0
    assert other.seed_variance is not None
    assert (other.seed_variance.ratio, other.seed_variance.estimate.low) == (None, None)
    assert other.seed_variance.note == "fewer than 3 seeds: no ratio"
    flat = [run("grpo", s, {9: 0.5 + 0.1 * s}) for s in range(3)]
    flat += [RunData("b", "b", s, {}, (), flat[0].evaluations) for s in range(3)]
    same = compare_runs(flat).labels[1].seed_variance
    assert same is not None
    assert (same.estimate.value, same.ratio, same.note) == (0.0, None, "no spread")


def store_runs(folder: Path) -> list[Path]:
    paths = []
    for found in two_seeds():
        store = RunStore(folder / f"{found.label}-seed{found.seed}")
        store.write_run({"algorithm": found.label, "label": found.label, "seed": found.seed})
        for row in found.metrics:
            store.append_metrics(row["step"], {k: v for k, v in row.items() if k != "step"})
        for record in found.evaluations:
            rates = [np.mean(row["scores"]) for row in record["problems"]]
            value = {"value": float(np.mean(rates)), "low": 0.0, "high": 1.0}
            store.write_evaluation(record["step"], {**record, "metrics": {"pass@1": value}})
        paths.append(store.folder)
    return paths


def numbers(text: str) -> list[float]:
    return [float(word.replace("−", "-")) for word in re.findall(r"[-−+]?\d+\.\d+", text)]


def test_terminal_page_curves_and_json_give_the_same_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=300))
    folders = store_runs(tmp_path / "runs")
    cli._conclude(folders, tmp_path)
    written = json.loads((tmp_path / "comparison.json").read_text())
    result = CliRunner().invoke(
        cli.app,
        ["report", *map(str, folders), "--out", str(tmp_path / "r.html"),
         "--figures", str(tmp_path / "figures")],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0
    figures = json.loads((tmp_path / "figures" / "comparison.json").read_text())
    assert figures == json.loads(json.dumps(written))
    page = (tmp_path / "report.html").read_text()
    assert written["intervals"] in page
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    (held_out,) = [chart for chart in data["charts"] if chart["key"] == "pass1"]
    (passk,) = [chart for chart in data["charts"] if chart["key"] == "passk"]
    comparison = compare_runs(load_runs(folders))
    rows = {row["label"]: row for row in table_rows(comparison)}
    cells = {row.label: row.cells for row in summarise(comparison).tables[0].rows}
    for label in written["labels"]:
        after = [label["after"][part] for part in ("value", "low", "high")]
        rounded = [round(value, 3) for value in after]
        assert numbers(rows[label["label"]]["pass@1 after"]) == rounded
        cell = cells[label["label"]][2]
        assert numbers(f"{cell.value} {cell.interval}") == rounded
        assert cell.interval in page
        (curve,) = [c for c in held_out["curves"] if c["label"] == label["label"]]
        assert [curve[part][-1] for part in ("y", "low", "high")] == pytest.approx(after, rel=1e-3)
        last = next(
            c for c in passk["curves"] if c["label"] == label["label"] and c["moment"] == "last"
        )
        assert [last[part][0] for part in ("mean", "low", "high")] == pytest.approx(after, rel=1e-3)


def test_the_terminal_names_what_the_intervals_are_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=300))
    cli._conclude(store_runs(tmp_path / "runs"), tmp_path)
    printed = capsys.readouterr().out
    assert "95 % intervals over seeds and problems" in printed
