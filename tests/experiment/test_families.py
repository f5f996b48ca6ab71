"""Related problems in a comparison: families are resampled, and every place says the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from asymgrpo import cli
from asymgrpo.errors import UserError
from asymgrpo.experiment.compare import compare_runs, load_runs, table_rows
from asymgrpo.experiment.comparison import RunData
from asymgrpo.experiment.statistics import ALPHA, over_seeds_and_problems, paired_bootstrap
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.summary import summarise


def brute_force(table: np.ndarray, families: list[int], draws: int, seed: int) -> np.ndarray:
    """Mean differences of families drawn one by one with replacement, no weights or sums."""
    rng = np.random.default_rng(seed)
    names = sorted(set(families))
    members = {name: [p for p, f in enumerate(families) if f == name] for name in names}
    means = []
    for _ in range(draws):
        drawn = [names[i] for i in rng.integers(len(names), size=len(names))]
        picked = [table[0, p] for name in drawn for p in members[name]]
        means.append(sum(picked) / len(picked))
    return np.array(means)


def test_one_seed_resamples_families_as_a_brute_force_does() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 7, size=60)
    families = [name for name, size in enumerate(sizes) for _ in range(size)]
    effect = rng.normal(0.05, 0.3, size=60)
    table = (effect[families] + rng.normal(0, 0.1, size=len(families)))[None]
    found = paired_bootstrap(table[None], families)
    resamples = brute_force(table, families, 20_000, seed=1)
    # the draws are those resamples, widened from the normal to Student's t with 59 degrees
    widen = math.sqrt(60 / 59) * stats.t.ppf(0.975, 59) / stats.norm.ppf(0.975)
    assert found.mean[0] == pytest.approx(table.mean(), abs=1e-12)
    assert found.draws.std() == pytest.approx(widen * resamples.std(), rel=0.03)
    spread = resamples.std()
    for level in (0.025, 0.25, 0.75, 0.975):
        expected = table.mean() + widen * (np.quantile(resamples, level) - table.mean())
        assert np.quantile(found.draws[:, 0], level) == pytest.approx(expected, abs=0.05 * spread)


def test_variances_are_those_of_a_loop_over_families() -> None:
    rng = np.random.default_rng(2)
    families = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    table = rng.normal(0, 1, size=(3, 10)) + rng.normal(0, 2, size=4)[families]
    found = paired_bootstrap(table[None], families)
    mean = table.mean()
    cells = [[mean + sum(table[s, p] - mean for p in range(10) if families[p] == f) * 4 / 10
              for f in range(4)] for s in range(3)]  # fmt: skip
    rows = [sum(row) / 4 for row in cells]
    columns = [sum(cells[s][f] for s in range(3)) / 3 for f in range(4)]
    rest = sum(
        (cells[s][f] - rows[s] - columns[f] + mean) ** 2 for s in range(3) for f in range(4)
    ) / (2 * 3)
    by_seed = 4 * sum((row - mean) ** 2 for row in rows) / 2
    by_family = 3 * sum((column - mean) ** 2 for column in columns) / 3
    assert rows == pytest.approx([float(row.mean()) for row in table])
    assert found.seed_variance[0] == pytest.approx(max(by_seed, rest) / 12)
    assert found.problem_variance[0] == pytest.approx(max(by_family - rest, 0) / 12)


def test_families_of_one_problem_are_problems() -> None:
    table = np.random.default_rng(3).normal(0.1, 0.3, size=(2, 3, 40))
    one, other = paired_bootstrap(table), paired_bootstrap(table, list(range(40)))
    assert np.allclose(one.draws, other.draws, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="one family"):
        paired_bootstrap(table, [0] * 40)


def related(rng: Any, worlds: int, seeds: int, families: int, size: int) -> np.ndarray:
    """Differences of 0 on average whose problems share their family's effect."""
    effect = np.repeat(rng.normal(0, 0.2, size=(worlds, 1, families)), size, axis=2)
    by_seed = rng.normal(0, 0.02, size=(worlds, seeds, 1))
    return effect + by_seed + rng.normal(0, 0.1, size=(worlds, seeds, families * size))


def pair_coverage(families: int, size: int, clustered: bool, worlds: int, seeds: int = 3) -> float:
    """The share of comparisons whose interval holds the true difference, 0."""
    table = related(np.random.default_rng(4), worlds, seeds, families, size)
    names = [place // size for place in range(families * size)]
    found = paired_bootstrap(table, names if clustered else None)
    held = (found.low <= 0) & (found.high >= 0)
    assert np.all((found.p_value < ALPHA) == ~held)
    return float(held.mean())


@pytest.mark.parametrize(("families", "size"), [(10, 20), (40, 5)])
def test_intervals_by_family_hold_the_truth_and_those_by_problem_do_not(
    families: int, size: int
) -> None:
    worlds = 400
    least = stats.binom.ppf(0.001, worlds, 0.95) / worlds
    assert least <= pair_coverage(families, size, True, worlds) <= 0.99
    assert pair_coverage(families, size, False, worlds) < least


def runs(cluster: str | None, size: int = 6) -> list[RunData]:
    rng = np.random.default_rng(5)
    found = []
    effect = np.repeat(rng.normal(0, 0.25, size=20), size)
    for label, shift in (("grpo", 0.0), ("ah-grpo", 1.0)):
        for seed in range(3):
            evaluations = []
            for step in (0, 8):
                chance = np.clip(0.5 + (0.05 + effect) * shift * (step > 0), 0, 1)
                problems = [
                    {"id": p, "scores": (rng.random(4) < chance[p]).astype(float).tolist()}
                    | ({"cluster": f"f{p // size}"} if cluster else {})
                    for p in range(20 * size)
                ]
                evaluations.append({"step": step, "k": [1, 2], "cluster": cluster, "metrics": {},
                                    "problems": problems})  # fmt: skip
            found.append(RunData(label, label, seed, {}, (), evaluations))
    return found


def width(estimate: Any) -> float:
    return float(estimate.high - estimate.low)


def test_a_comparison_by_family_is_wider_everywhere_and_says_so() -> None:
    plain, by_family = compare_runs(runs(None)), compare_runs(runs("template"))
    assert plain.intervals == "Means over seeds, with 95 % intervals over seeds and problems."
    assert by_family.intervals == (
        "Means over seeds, with 95 % intervals over seeds and families of problems (template)."
    )
    one, other = (found.pair("ah-grpo", "grpo") for found in (plain, by_family))
    assert one.difference is not None
    assert other.difference is not None
    assert one.difference.value == other.difference.value
    assert width(other.difference) > 1.5 * width(one.difference)
    assert (one.families, other.families, other.problems) == (None, 20, 120)
    values = np.array([
        [np.mean(row["scores"]) for row in run.evaluations[-1]["problems"]]
        for run in runs("template")
    ])  # fmt: skip
    names = [f"f{p // 6}" for p in range(120)]
    expected = paired_bootstrap((values[3:] - values[:3])[None], names)
    assert other.p_value == expected.p_value[0]
    after = by_family.labels[1].after
    assert after == over_seeds_and_problems(values[3:], 0.0, names)


def test_unlike_families_are_told() -> None:
    mixed = runs("template")[:3] + runs("document")[3:]
    with pytest.raises(UserError, match="unlike families"):
        compare_runs(mixed)


ROWS = [
    {"id": f"q{n}", "question": f"{n} + {n % 3}", "answer": str(n + n % 3), "kind": f"k{n % 3}"}
    for n in range(12)
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, measured and compared by family from the start."""
    folder = tmp_path_factory.mktemp("families")
    write_rows(folder, ROWS)
    for algorithm in ("grpo", "abc-grpo"):
        train(folder, algorithm)
    compare(folder, "--cluster", "kind")
    return folder


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(folder: Path, *words: str) -> None:
    result = CliRunner().invoke(
        cli.app,
        [*words, "--steps", "1", "--eval-every", "1",
         "--task", f"jsonl:{folder}/rows.jsonl?grader=number", "--prompt", "{question}",
         *("--set", "per_device_train_batch_size=8", "--set", "num_generations=4"),
         *("--set", "steps_per_generation=1", "--set", "max_completion_length=8"),
         *("--set", "eval_problems=12", "--set", "eval_samples=2", "--set", "report_to=none")],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output


def train(folder: Path, algorithm: str) -> None:
    """Here and not by `compare`, whose worker is a process that takes long to start."""
    out = str(folder / "out" / f"{algorithm}-seed0")
    command(folder, "train", "--algorithm", algorithm, "--out", out, "--cluster", "kind")


def compare(folder: Path, *words: str) -> None:
    command(folder, "compare", "--algorithms", "grpo,abc-grpo", "--seeds", "1", "--out",
            str(folder / "out"), *words)  # fmt: skip


def test_the_command_line_keeps_the_families(
    compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(cli, "console", Console(width=300))
    store = RunStore(compared / "out" / "grpo-seed0")
    assert store.run()["settings"]["cluster"] == "kind"
    for record in store.evaluations():
        assert record["cluster"] == "kind"
        assert [problem["cluster"] for problem in record["problems"]] == [r["kind"] for r in ROWS]
    written = json.loads((compared / "out" / "comparison.json").read_text())
    assert written["cluster"] == "kind"
    assert {pair["families"] for pair in written["pairs"]} == {3}
    assert "families of problems (kind)" in written["intervals"]
    page = (compared / "out" / "report.html").read_text()
    assert written["intervals"] in page
    comparison = compare_runs(load_runs(sorted(compared.glob("out/*-seed0"))))
    rows = {row["label"]: row["pass@1 after"] for row in table_rows(comparison)}
    cells = {row.label: row.cells for row in summarise(comparison).tables[0].rows}
    for label in written["labels"]:
        after = label["after"]
        assert rows[label["label"]] == (
            f"{after['value']:.3f} [{after['low']:.3f}, {after['high']:.3f}]"
        )
        assert f"{after['high']:.3f}" in str(cells[label["label"]][2].interval)


def test_families_can_change_without_another_run(compared: Path) -> None:
    store = RunStore(compared / "out" / "grpo-seed0")
    weights = (store.folder / "final" / "model.safetensors").stat().st_mtime_ns
    before = store.evaluations()
    compare(compared)
    plain = store.evaluations()
    assert [record["cluster"] for record in plain] == [None, None]
    assert all("cluster" not in problem for record in plain for problem in record["problems"])
    compare(compared, "--cluster", "kind")
    assert store.evaluations() == before
    assert (store.folder / "final" / "model.safetensors").stat().st_mtime_ns == weights


def test_data_that_was_edited_is_noticed(compared: Path) -> None:
    edited = [{**row, "answer": "0"} if row["id"] == "q5" else row for row in ROWS]
    write_rows(compared, edited)
    try:
        with pytest.raises(UserError, match=r"problem q5 of jsonl:.* was edited since"):
            compare(compared, "--cluster", "answer")
        # a run that is made now is paired on the problems that are still the same
        train(compared, "dapo")
        found = compare_runs(load_runs(sorted(compared.glob("out/*-seed0"))))
        pair = next(p for p in found.pairs if "dapo" in (p.first, p.second))
        assert (pair.problems, pair.families) == (11, 3)
        assert "on the 11 problems that all have" in pair.note
    finally:
        write_rows(compared, ROWS)
