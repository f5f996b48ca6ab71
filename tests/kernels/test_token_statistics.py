"""Token statistics against full logits in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asymgrpo.kernels.token_statistics import token_statistics

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def definition(hidden, weight, bias, targets, temperature, soft_cap, logit_scale):
    """Full logits, no shortcuts."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def example(dtype, device="cpu", *, tokens=37, width=16, words=101, with_bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64) * 2
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(words, generator=generator, dtype=torch.float64) if with_bias else None
    targets = torch.randint(words, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    moved = [None if x is None else x.to(device, dtype) for x in (hidden, weight, bias, weights)]
    return moved[0], moved[1], moved[2], targets.to(device), moved[3]


def gradients(function, inputs, targets, weights, through, **options):
    leaves = [
        None if x is None else x.detach().clone().requires_grad_(train) for x, train in inputs
    ]
    logps, entropies = function(*leaves, targets, **options)
    loss = 0.0
    if "logps" in through:
        loss = loss + (weights[0].to(logps.dtype) * logps).sum()
    if "entropies" in through:
        loss = loss + (weights[1].to(logps.dtype) * entropies).sum()
    loss.backward()
    found = [None if x is None or not x.requires_grad else x.grad for x in leaves]
    return logps.detach(), entropies.detach(), found


OPTIONS = [
    {"temperature": 1.0, "soft_cap": None, "logit_scale": 1.0},
    {"temperature": 0.7, "soft_cap": None, "logit_scale": 0.25},
    {"temperature": 1.3, "soft_cap": 5.0, "logit_scale": 2.0},
]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("through", [["logps"], ["entropies"], ["logps", "entropies"]])
@pytest.mark.parametrize("chunk", [(1000, 1000), (8, 32), (5, 7)])
def test_equals_full_logits(device, options, train_head, through, chunk):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        *tensors, targets, weights = example(dtype, device)
        trained = zip(tensors, (True, train_head, train_head), strict=True)
        actual = gradients(
            token_statistics, list(trained), targets, weights, through, chunk=chunk, **options
        )
        wide = [
            (x.double(), train)
            for x, train in zip(tensors, (True, train_head, train_head), strict=True)
        ]
        expected = gradients(definition, wide, targets, weights, through, **options)
        for found, wanted in zip(
            [*actual[:2], *actual[2]], [*expected[:2], *expected[2]], strict=True
        ):
            assert (found is None) == (wanted is None)
            if found is not None:
                scale = max(1.0, float(wanted.abs().max()))
                assert (found - wanted).abs().max() <= tolerance * scale


def test_frozen_head_gets_no_gradient_and_none_is_recomputed(monkeypatch):
    from asymgrpo.kernels.token_statistics import logit_tiles as tiles

    hidden, weight, _, targets, weights = example(torch.float32, with_bias=False)
    hidden.requires_grad_(True)
    logps, _ = token_statistics(hidden, weight, None, targets, chunk=(8, 16))
    # The backward pass of log-probs under a frozen head is a scaling: no tile is formed again.
    monkeypatch.setattr(tiles, "logits", None)
    (weights[0] * logps).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_gradient_keeps_its_digits_where_the_target_is_almost_certain():
    # Target logits 12 above the rest: p_t = 1 - 1e-4, where 1 - p_t in bfloat16 factors of p_t
    # would be off by up to 2^-9, twenty times the gradient itself.
    weight = torch.eye(8, dtype=torch.bfloat16) * 12
    hidden = torch.eye(8, dtype=torch.bfloat16)
    targets = torch.arange(8)
    leaf = hidden.clone().requires_grad_(True)
    token_statistics(leaf, weight, None, targets)[0].sum().backward()
    wide = hidden.double().requires_grad_(True)
    definition(wide, weight.double(), None, targets, 1.0, None, 1.0)[0].sum().backward()
    assert (leaf.grad.double() - wide.grad).abs().max() <= 2**-8 * wide.grad.abs().max()


def test_bfloat16_within_its_rounding():
    hidden, weight, bias, targets, _ = example(torch.bfloat16, tokens=64)
    logps, entropies = token_statistics(hidden, weight, bias, targets, chunk=(16, 32))
    wanted = definition(hidden.double(), weight.double(), bias.double(), targets, 1.0, None, 1.0)
    # The operands are bfloat16 already; the products and sums are float32.
    assert logps.dtype == torch.float32
    assert (logps - wanted[0]).abs().max() < 1e-4
    assert (entropies - wanted[1]).abs().max() < 1e-4


def test_no_tokens_keep_the_graph():
    hidden = torch.zeros(0, 4, requires_grad=True)
    logps, entropies = token_statistics(
        hidden, torch.randn(8, 4), None, torch.zeros(0, dtype=torch.long)
    )
    assert logps.shape == entropies.shape == (0,)
    logps.sum().backward()
    assert hidden.grad is not None


def test_autocast_uses_its_dtype_for_the_product():
    hidden, weight, bias, targets, _ = example(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps, _ = token_statistics(hidden, weight, bias, targets)
    rounded = definition(
        hidden.bfloat16().double(), weight.bfloat16().double(), bias.double(), targets, 1, None, 1
    )[0]
    assert (logps - rounded).abs().max() < 1e-4


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="disagree"):
        token_statistics(torch.zeros(2, 3), torch.zeros(5, 4), None, torch.zeros(2).long())
    with pytest.raises(ValueError, match="targets"):
        token_statistics(torch.zeros(2, 3), torch.zeros(5, 3), None, torch.zeros(3).long())


INTERPRETED = """
import torch
from asymgrpo.kernels.token_statistics import logit_tiles as tiles
from asymgrpo.kernels.token_statistics.chunked_statistics import Head, _Running
from asymgrpo.kernels.token_statistics import triton_tiles as kernels
kernels._BLOCK = 32
torch.manual_seed(0)
for cap, temperature, scale in ((None, 1.0, 1.0), (4.0, 0.7, 1.5)):
    head = Head(None, None, scale, cap, temperature)
    targets = torch.tensor([0, 40, 120, 71, 99, 3, 65])
    states = []
    outputs = []
    for fold in (tiles.fold, kernels.fold_tile):
        torch.manual_seed(1)
        state = _Running(*torch.zeros(4, 7))
        state.maximum.fill_(-1e30)
        found = torch.randn(7, 1030)
        kept = [found]
        for start, width in ((0, 70), (70, 31), (101, 20)):
            tile = torch.randn(7, width) * 6
            kept.append(fold(tile, targets, start, state, head, torch.float32, found))
        states.append(state)
        outputs.append(kept)
    for ours, theirs in zip([*states[1], *outputs[1]], [*states[0], *outputs[0]]):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    tile = torch.randn(7, 70)
    rows = [torch.randn(7) for _ in range(4)]
    for logps, entropies in ((rows[2], rows[3]), (None, rows[3]), (rows[2], None)):
        arguments = (tile, targets, 30, rows[0] + 4, rows[1], logps, entropies, head, torch.float32)
        torch.testing.assert_close(
            kernels.gradient_tile(*arguments), tiles.gradient(*arguments), rtol=1e-5, atol=1e-5
        )
print("agree")
"""


def test_triton_kernels_agree_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "agree", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("through", [["logps"], ["logps", "entropies"]])
def test_bfloat16_on_the_gpu(options, through):
    *tensors, targets, weights = example(
        torch.bfloat16, "cuda", tokens=700, width=256, words=5003, with_bias=False
    )
    tensors[1] *= 0.1
    pairs = [(tensors[0], True), (tensors[1], False), (None, False)]
    actual = gradients(
        token_statistics, pairs, targets, weights, through, chunk=(256, 1024), **options
    )
    wide = [(None if x is None else x.double(), train) for x, train in pairs]
    expected = gradients(definition, wide, targets, weights.double(), through, **options)
    assert (actual[0] - expected[0]).abs().max() < 1e-3
    assert (actual[1] - expected[1]).abs().max() < 1e-3
    wanted = expected[2][0]
    assert (actual[2][0].double() - wanted).norm() / wanted.norm() < 5e-3
