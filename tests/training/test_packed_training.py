"""Training runs with packed rollouts against the same runs with TRL's padded ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packed_run import make_model, run


def assert_follows(packed, padded, tolerance=1e-5):
    """Every logged figure and every parameter within `tolerance` of its own size."""
    assert packed["packs"]
    assert len(packed["history"]) == len(padded["history"])
    for ours, theirs in zip(packed["history"], padded["history"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert abs(ours[name] - theirs[name]) <= tolerance * max(1.0, abs(theirs[name])), name
    assert packed["parameters"].keys() == padded["parameters"].keys()
    for name, theirs in padded["parameters"].items():
        wanted = torch.tensor(theirs)
        error = (torch.tensor(packed["parameters"][name]) - wanted).abs().max()
        assert error <= tolerance * max(1.0, wanted.abs().max().item()), name


CASES = {
    "gradient accumulation and an entropy bonus": {
        "gradient_accumulation_steps": 4,
        "entropy_bonus": 0.05,
    },
    "adapter, kl to the model without it": {"lora": True, "beta": 0.1},
    # Four optimiser steps a pass and two passes over a rollout batch: the ratio leaves 1.
    "4 mini-batches, truncated rollouts masked": {
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 8,
        "mask_truncated_completions": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_packed_follows_padded(case):
    packed, padded = (run(scorer, **CASES[case]) for scorer in ("packed", "padded"))
    assert_follows(packed, padded)
    if "mini-batches" in case:
        assert max(abs(row["ratio/max"] - 1) for row in padded["history"]) > 1e-3
    if "kl" in case:
        assert padded["history"][-1]["kl"] > 1e-3


def test_twenty_steps_follow_within_rounding():
    packed, padded = (run(scorer, max_steps=20) for scorer in ("packed", "padded"))
    # Rounding of each step is carried on by the next ones.
    assert_follows(packed, padded, tolerance=5e-5)
    start = dict(make_model().named_parameters())
    moved = max(
        (torch.tensor(p) - start[n].detach().flatten()).abs().max().item()
        for n, p in padded["parameters"].items()
    )
    assert moved > 0.01


def test_two_processes(tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    out = tmp_path / "result"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(str(Path(__file__).parent / "packed_run.py"), str(out), json.dumps(options)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
    # The gradients were averaged: both processes hold the same parameters.
    for scorer in ("packed", "padded"):
        assert ranks[0][scorer]["parameters"] == ranks[1][scorer]["parameters"]
    assert_follows(ranks[0]["packed"], ranks[0]["padded"])
