"""Long runs and large files: what is kept, and what is read, stays bounded."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo.experiment import run as run_module
from asymgrpo.experiment.display import MetricsTail
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore, kept_steps
from asymgrpo.report import inspect_run
from asymgrpo.report.rollouts import MAX_STEPS
from asymgrpo.report.terminal import scale_of
from outcome import outcome


@pytest.mark.parametrize(("limit", "spacing"), [(4, 1), (8, 3), (256, 4)])
def test_kept_rollouts_are_few_and_spread_over_the_run(limit: int, spacing: int) -> None:
    """Whenever it is looked at: bounded, with the first and last, in strides that differ by one
    place at most; and dropping as it goes leaves what dropping at the end leaves."""
    kept: list[int] = []
    steps = range(spacing, 700 * spacing, spacing)
    for newest in steps:
        kept = kept_steps([*kept, newest], limit, spacing)
        whole = kept_steps([step for step in steps if step <= newest], limit, spacing)
        assert kept == whole
        assert len(kept) <= limit + 1
        assert len(kept) >= min(limit // 2, newest // spacing)
        assert (kept[0], kept[-1]) == (spacing, newest)
        assert len({b - a for a, b in itertools.pairwise(kept[:-1])}) <= 1
    assert kept_steps(list(steps), 0, spacing) == list(steps)


class Cut(Exception):
    """Stands for the power cut."""


def test_a_long_run_keeps_a_bounded_number_of_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is cut after files were dropped: it ends with those of an uncut run."""
    settings = small(steps=11, keep_rollouts=4, trainer={"steps_per_generation": 1})
    train_run(settings, tmp_path / "whole")
    assert RunStore(tmp_path / "whole").rollout_steps() == [1, 5, 9, 11]
    original = run_module.AsymGRPOTrainer.training_step

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= 9:
            raise Cut
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(run_module.AsymGRPOTrainer, "training_step", dying)
        with pytest.raises(Cut):
            train_run(settings, tmp_path / "cut")
    train_run(settings, tmp_path / "cut")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_the_default_keeps_as_many_as_a_page_reads() -> None:
    limit = small().keep_rollouts
    assert limit // 2 >= MAX_STEPS


TOKENS, ROWS = 2_000, 400


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run with one step of many long rollouts."""
    store = RunStore(tmp_path_factory.mktemp("large") / "run")
    store.write_run({"algorithm": "grpo", "label": "grpo"})
    rng = np.random.default_rng(0)
    numbers = ("logps", "entropies", "discount", "ratio", "weight", "grpo_weight")
    store.write_rollouts(
        1,
        [
            {"step": 1, "group": place // 8, "rollout": place, "prompt": "p", "completion": "c",
             "reward": 1.0, "advantage": float(place % 2) - 0.5, "truncated": False,
             "tokens": [str(n) for n in rng.integers(0, 10**9, TOKENS)],
             **{name: rng.normal(size=TOKENS).tolist() for name in numbers}}
            for place in range(ROWS)
        ],
    )  # fmt: skip
    return store


def test_inspect_reads_a_large_file_by_row_groups(large: RunStore) -> None:
    path = large.rollouts_path(1)
    decoded = pq.read_table(path).nbytes
    assert pq.ParquetFile(path).num_row_groups > 10
    assert decoded > 25_000_000
    pool = pa.default_memory_pool()
    measured = pa.proxy_memory_pool(pool)
    before = pa.default_memory_pool()
    pa.set_memory_pool(measured)
    try:
        out = io.StringIO()
        inspect_run(large, 1, colour_by="weight", limit=4, console=Console(file=out, width=100))
        peak = measured.max_memory()
    finally:
        pa.set_memory_pool(before)
    assert 0 < peak < decoded / 4
    assert f"{ROWS - 4} more rollouts" in out.getvalue()


def test_what_inspect_shows_of_a_large_file_is_what_is_in_it(large: RunStore) -> None:
    rows = large.rollouts(1)
    assert large.rollouts_at(1, [399, 0, 17]) == [rows[399], rows[0], rows[17]]
    light = large.rollout_columns(1, ["group", "advantage"])
    assert light == [{"group": row["group"], "advantage": row["advantage"]} for row in rows]
    values = np.abs([value for row in rows for value in row["entropies"]])
    exact = np.percentile(values, 99)
    assert scale_of(large.token_values(1, ["entropies"]), "entropy") == pytest.approx(
        exact, rel=1e-6
    )


def test_a_display_reads_only_the_new_lines_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path / "run")
    path = tmp_path / "run/metrics.jsonl"
    for step in range(1, 501):
        store.append_metrics(step, {"reward": step / 1000, "entropy": 1.0})
    read = 0
    opened = builtins.open

    def counting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        found = opened(file, mode, *args, **kwargs)
        if Path(file) == path and "r" in mode:
            original = found.read

            def counted(*sizes: int) -> bytes:
                nonlocal read
                data: bytes = original(*sizes)
                read += len(data)
                return data

            found.read = counted
        return found

    def no_whole_files(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{self} is read as a whole")

    monkeypatch.setattr(Path, "read_text", no_whole_files)
    monkeypatch.setattr(Path, "read_bytes", no_whole_files)
    monkeypatch.setattr(builtins, "open", counting)
    tail = MetricsTail(store)
    assert tail.look() == (500, {"reward": 0.5, "entropy": 1.0})
    whole, read = read, 0
    assert whole == os.path.getsize(path)
    for _ in range(10):
        tail.look()
    assert read == 0
    store.append_metrics(501, {"reward": None})  # type: ignore[dict-item]
    with opened(path, "a", encoding="utf-8") as file:
        file.write('{"step": 502, "rew')  # in the middle of a write
    assert tail.look() == (501, {"reward": None, "entropy": 1.0})
    with opened(path, "a", encoding="utf-8") as file:
        file.write('ard": 0.25}\n')
    assert tail.look() == (502, {"reward": 0.25, "entropy": 1.0})
    assert read < 300
    monkeypatch.undo()
    store.truncate_metrics(3)  # a run that goes on from a checkpoint begins its log anew
    assert tail.look() == (3, {"reward": 0.003, "entropy": 1.0})
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 3
