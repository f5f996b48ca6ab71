"""Which rollouts a page carries, and that packing keeps their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import rollouts, write_runs

from asymgrpo.report import rollouts as packing
from asymgrpo.report.distributions import is_negative
from asymgrpo.report.rollouts import choose, evenly, pack, packed_size, read_rollouts, token_pages
from asymgrpo.report.sources import find_sources


def unpack(packed: dict[str, Any], short: str, place: int) -> float | None:
    """As the page's script reads a column."""
    column = packed["w"] if packed[short] == "w" else packed[short]
    if isinstance(column, str):
        return int(column[place])
    if isinstance(column, dict):
        value = column["v"][place]
        return None if value is None else value * 10.0 ** column["e"]
    return column[place] if isinstance(column, list) else column


def test_packing_keeps_four_digits_of_the_largest() -> None:
    generator = np.random.default_rng(3)
    columns = {**packing.NUMBERS, **packing.CODES, "token_ids": "id"}
    for algorithm in ("grpo", "sa-ah-grpo", "abc-grpo"):
        for row in rollouts(algorithm, 1, 0.5, generator):
            packed = pack(row)
            assert packed["t"] == row["tokens"]
            for name, short in columns.items():
                largest = max(abs(value) for value in row[name])
                for place, value in enumerate(row[name]):
                    assert unpack(packed, short, place) == pytest.approx(
                        float(value), rel=0, abs=5.1e-5 * largest
                    )
    positive = next(
        row for row in rollouts("sa-ah-grpo", 1, 0.5, generator) if not is_negative(row)
    )
    assert pack(positive)["gw"] == "w"
    assert pack(positive)["d"] == 1


def test_packing_odd_rollouts() -> None:
    bare = pack({"group": 1, "rollout": 2, "completion": "x" * 200_000, "advantage": math.nan})
    assert bare == {"g": 1, "i": 2, "text": "x" * packing.MAX_TEXT}
    odd = pack({"tokens": ["a", None], "weight": [math.nan, math.inf], "ratio": [1.0]})
    assert odd["t"] == ["a", ""]
    assert odd["w"] == {"e": 0, "v": [None, None]}
    assert "r" not in odd  # a column of another length belongs to other tokens
    long = pack({"tokens": ["ab"] * 10_000, "entropies": [0.5] * 10_000})
    assert (len(long["t"]), long["n"]) == (packing.MAX_TOKENS, 10_000)
    assert long["rest"] == "ab" * (10_000 - packing.MAX_TOKENS)
    json.dumps([bare, odd, long], allow_nan=False)
    holes = {"tokens": ["a", "b"], "entropies": [None, 0.5], "weight": None}
    assert pack(holes)["h"]["v"] == [None, 50000]
    assert 100 < packed_size(holes) < 200


def test_the_size_is_foretold() -> None:
    generator = np.random.default_rng(4)
    for algorithm in ("grpo", "sa-ah-grpo", "ah-grpo"):
        rows = rollouts(algorithm, 1, 0.5, generator)
        real = sum(len(json.dumps(pack(row), separators=(",", ":"))) for row in rows)
        assert 0.9 < real / sum(map(packed_size, rows)) < 1.1


def test_evenly_spaced_steps() -> None:
    assert evenly(list(range(100)), 1000) == list(range(100))
    assert evenly([5, 6, 7], 1) == [7]
    spaced = evenly(list(range(0, 5000, 10)), 12)
    assert (spaced[0], spaced[-1], len(spaced)) == (0, 4990, 12)
    assert len(set(spaced)) == 12


def test_groups_with_both_signs_come_first_and_signs_alternate() -> None:
    signs = {0: [1, 1, 1], 1: [1, 1, -1, -1], 2: [-1, -1]}
    rows = [
        {"group": group, "advantage": float(sign)} for group, own in signs.items() for sign in own
    ]
    sizes = [10] * len(rows)
    assert choose(rows, sizes, 1000) == list(range(len(rows)))
    assert [rows[place]["group"] for place in choose(rows, sizes, 40)] == [1] * 4
    two = choose(rows, sizes, 20)
    assert sorted(rows[place]["advantage"] for place in two) == [-1.0, 1.0]
    assert len(choose(rows, sizes, 1)) == 1


def test_the_page_stays_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_runs(tmp_path / "runs", seeds=1, steps=40, save_every=2, problems=2)
    sources = find_sources([tmp_path / "runs"])
    rows = read_rollouts(sources)
    whole = token_pages(sources, rows)
    assert all(page.complete for page in whole)
    monkeypatch.setattr(packing, "PAGE_BUDGET", 60_000)
    rows = read_rollouts(sources)
    small = token_pages(sources, rows)
    size = sum(len(json.dumps(page.pages, separators=(",", ":"))) for page in small)
    assert 20_000 < size < 75_000  # prompts come on top of the rollouts
    for page in small:
        assert not page.complete
        assert page.steps[0] == 1
        assert page.steps[-1] == 40
        for step in page.pages:
            assert len({rollout["a"] < 0 for rollout in step["rollouts"]}) == 2
    monkeypatch.setattr(packing, "MAX_STEPS", 4)
    monkeypatch.setattr(packing, "MIN_STEPS", 2)
    assert [sorted(steps) for steps in read_rollouts(sources).values()] == [[1, 40]] * 2


def test_scales_are_percentiles_of_the_tokens(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", ("sa-ah-grpo",), seeds=1, steps=4, save_every=2, problems=2)
    sources = find_sources([tmp_path / "runs"])
    rows = read_rollouts(sources)
    (page,) = token_pages(sources, rows)
    every = [row for step in rows["sa-ah-grpo-s0"].values() for row in step]
    entropies = sorted(value for row in every for value in row["entropies"])
    assert page.scales["h"] == pytest.approx(np.percentile(entropies, 99), rel=5e-3)
    logs = [abs(math.log(value)) for row in every for value in row["ratio"]]
    assert page.scales["r"] == pytest.approx(np.percentile(logs, 99), rel=5e-3)
