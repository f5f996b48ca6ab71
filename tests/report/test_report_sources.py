"""Reading runs: ours and TRL's, whole and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asymgrpo.errors import UserError
from asymgrpo.experiment.store import RunStore
from asymgrpo.report.curves import CHARTS, chart_curves
from asymgrpo.report.sources import find_sources, read_source, state_file

LOGS = Path(__file__).parents[3] / "shared" / "data" / "trl-logs"


def write_state(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> Path:
    folder.mkdir(parents=True)
    state = {"global_step": 10, "max_steps": 10, "log_history": rows} | fields
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_trl_names_become_ours(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "reward": 0.1, "entropy": 1.5, "grad_norm": 0.3, "clip_ratio/low_mean": 0.01},
        {"step": 2, "reward": 0.2, "kl": 0.01, "completions/mean_length": 90.0, "step_time": 2.0},
        {"step": 2, "eval_reward": 0.5, "train_runtime": 12.0},
        {"step": 3, "reward": float("nan"), "frac_reward_zero_std": 0.25},
        {"epoch": 1.0},
    ]
    source = read_source(write_state(tmp_path / "my-grpo-seed7", rows))
    assert (source.label, source.seed, source.kind) == ("my-grpo", 7, "trl")
    assert source.series("reward/mean") == ([1, 2], [0.1, 0.2])
    assert source.series("gradient/norm") == ([1], [0.3])
    assert source.series("length/mean") == ([2], [90.0])
    assert source.series("time/step") == ([2], [2.0])
    assert source.series("evaluation/reward") == ([2], [0.5])
    assert source.series("reward/zero_variance_groups") == ([3], [0.25])
    assert source.series("clip/q3") == ([1], [0.01])
    assert source.series("clip/q4") == ([], [])
    drawn = {chart.key for chart in CHARTS if chart_curves(chart, [source])}
    assert drawn == {
        *("reward", "evaluation-reward", "entropy", "gradient", "kl", "length"),
        *("zero-variance", "q3", "step-time"),
    }


def test_the_newest_checkpoint_is_read(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write_state(tmp_path / "out" / f"checkpoint-{step}", [{"step": step, "reward": 0.5}])
    found = state_file(tmp_path / "out")
    assert found is not None
    assert found.parent.name == "checkpoint-100"
    (tmp_path / "out" / "checkpoint-100" / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "some/model"}'
    )
    source = read_source(tmp_path / "out")
    assert source.record["model"] == "some/model"
    assert source.label == "out"


@pytest.mark.skipif(not LOGS.is_dir(), reason="the published TRL logs are not here")
def test_the_abc_grpo_log_counts_four_quadrants() -> None:
    grpo = read_source(LOGS / "qwen3-1.7b-base-grpo")
    abc = read_source(LOGS / "qwen3-1.7b-base-abc-grpo")
    assert grpo.notes
    assert not abc.notes
    assert grpo.series("clip/q2") == ([], [])
    quadrants = [abc.series(f"clip/q{number}")[1] for number in range(1, 5)]
    whole = [row["clip_ratio/region_mean"] for row in abc.metrics]
    low = [row["clip_ratio/low_mean"] for row in abc.metrics]
    # All four together are the whole; Q2 and Q3, where the ratio is low, are the low part up to
    # the averaging of the split over micro-batches.
    assert [sum(four) for four in zip(*quadrants, strict=True)] == pytest.approx(whole, rel=1e-4)
    assert sum(quadrants[1]) + sum(quadrants[2]) == pytest.approx(sum(low), rel=0.03)
    assert grpo.series("entropy/mean")[1][0] == pytest.approx(1.47, abs=5e-3)
    assert grpo.series("entropy/mean")[1][-1] == pytest.approx(0.07, abs=5e-3)
    assert abc.series("entropy/mean")[1][-1] == pytest.approx(0.30, abs=1e-2)


def test_our_own_run_is_not_taken_for_its_checkpoint(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs" / "a")
    store.write_run({"algorithm": "grpo", "label": "grpo alpha=0", "seed": 3})
    store.append_metrics(1, {"reward/mean": 0.5, "grad_norm": 2.0})
    write_state(store.folder / "checkpoint-1", [{"step": 1, "reward": 0.9}])
    (source,) = find_sources([tmp_path / "runs"])
    assert (source.kind, source.label, source.seed) == ("asymgrpo", "grpo alpha=0", 3)
    assert source.series("reward/mean") == ([1], [0.5])
    assert source.series("gradient/norm") == ([1], [2.0])


def test_folders_of_runs_expand_once_and_names_stay_apart(tmp_path: Path) -> None:
    for parent in ("one", "two"):
        RunStore(tmp_path / parent / "run").write_run({"algorithm": "grpo", "seed": 0})
    (tmp_path / "one" / "notes").mkdir()
    sources = find_sources([tmp_path / "one", tmp_path / "two", tmp_path / "one" / "run"])
    assert [source.name for source in sources] == ["one/run", "two/run"]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is no run and holds none"):
        find_sources([tmp_path / "empty"])
    with pytest.raises(UserError, match="no folder at"):
        find_sources([tmp_path / "missing"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(UserError, match="is not a trainer state"):
        find_sources([tmp_path / "broken"])
    (tmp_path / "broken" / "trainer_state.json").write_text("{")
    with pytest.raises(UserError, match="is not a trainer state"):
        find_sources([tmp_path / "broken"])
