"""Training runs with packed rollouts against the same runs with TRL's padded ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packed_run import run


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
    "one micro-batch": {},
    "gradient accumulation": {"gradient_accumulation_steps": 4},
    "kl to the base model": {"lora": True, "beta": 0.1},
    # Two optimiser steps a rollout batch and two passes over it: the ratio leaves 1.
    "4 mini-batches": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 8},
    "masked truncated rollouts": {"mask_truncated_completions": True},
    "entropy bonus": {"entropy_bonus": 0.05},
    "adapter": {"lora": True},
}


@pytest.mark.parametrize("case", CASES)
def test_packed_follows_padded(case):
    packed, padded = (run(scorer, **CASES[case]) for scorer in ("packed", "padded"))
    assert_follows(packed, padded)
    if case == "4 mini-batches":
        assert max(abs(row["ratio/max"] - 1) for row in padded["history"]) > 1e-3
    if case == "kl to the base model":
        assert padded["history"][-1]["kl"] > 1e-3


def test_twenty_steps_follow_within_rounding():
    packed, padded = (run(scorer, max_steps=20) for scorer in ("packed", "padded"))
    # Rounding of each step is carried on by the next ones.
    assert_follows(packed, padded, tolerance=5e-5)
    start = run("padded", max_steps=1)["parameters"]
    moved = max(
        (torch.tensor(p) - torch.tensor(start[n])).abs().max().item()
        for n, p in padded["parameters"].items()
    )
    assert moved > 0.01


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "lora": True}])
def test_two_processes(tmp_path, options):
    results = {}
    for scorer in ("packed", "padded"):
        out = tmp_path / scorer
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            str(Path(__file__).parent / "packed_run.py"),
            *(scorer, str(out), json.dumps(options)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[scorer] = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
    # The gradients were averaged: both processes hold the same parameters.
    for ranks in results.values():
        assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert_follows(results["packed"][0], results["padded"][0])
