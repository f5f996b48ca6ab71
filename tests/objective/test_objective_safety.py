"""Numbers that must not matter, and numbers that must not break anything."""

import math
from dataclasses import replace

import pytest
import torch
from batches import FEW_SEEDS, GARBAGE, VOCAB, gradients, random_batch, rows_of

from asymgrpo import ALGORITHMS, Objective, TokenBatch, algorithm

COLUMNS = ("logps", "old_logps", "entropies", "ref_logps", "sampling_weights")
EVERYTHING = {"beta": 0.1, "entropy_bonus": 0.1, "top_entropy": 0.7}


def everything_of(config, batch):
    """Loss, gradients, metrics and trace."""
    out = Objective(config)(batch)
    slopes = torch.autograd.grad(out.loss, [batch.logps, batch.entropies])
    return [out.loss.detach(), *slopes, *vars(out.tokens).values(), out.sums.totals]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_positions_may_hold_anything(name, level):
    config = algorithm(name, level=level, **EVERYTHING)
    for seed in FEW_SEEDS:
        batch = random_batch(seed, torch.float32)
        mask = batch.mask.bool()
        clean = replace(
            batch,
            **{
                column: getattr(batch, column).detach().masked_fill(~mask, 0.0).requires_grad_()
                for column in COLUMNS
            },
        )
        wanted = everything_of(config, clean)
        for found, value in zip(everything_of(config, batch), wanted, strict=True):
            assert torch.equal(found, value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_rollout_without_tokens_changes_nothing(name):
    config = algorithm(name, **EVERYTHING)
    exact = {"rtol": 1e-13, "atol": 1e-15}
    for seed in FEW_SEEDS:
        batch = random_batch(seed)
        wanted = everything_of(config, batch)
        for garbage in GARBAGE:
            rows = {
                column: torch.cat([value, torch.full_like(value[:1], garbage)]).requires_grad_()
                for column in COLUMNS
                if (value := getattr(batch, column).detach()) is not None
            }
            rows["mask"] = torch.cat([batch.mask, torch.zeros_like(batch.mask[:1])])
            rows["advantages"] = torch.cat([batch.advantages, torch.full((1,), garbage).double()])
            for found, value in zip(
                everything_of(config, replace(batch, **rows)), wanted, strict=True
            ):
                if found.shape != value.shape:
                    assert not found[-1].any()
                    found = found[:-1]
                torch.testing.assert_close(found, value, **exact)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_any_token(name):
    for columns in (0, 3):
        batch = TokenBatch(
            logps=torch.full((2, columns), math.nan, requires_grad=True),
            old_logps=torch.full((2, columns), math.nan),
            mask=torch.zeros(2, columns),
            advantages=torch.tensor([1.0, -1.0]),
            entropies=torch.full((2, columns), math.nan, requires_grad=True),
            vocab_size=VOCAB,
        )
        loss, slope, *_ = everything_of(algorithm(name, entropy_bonus=0.1, top_entropy=0.5), batch)
        assert loss == 0
        assert not slope.any()
        assert Objective(algorithm(name))(batch).metrics == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_half_precision_is_computed_in_float32(name, dtype):
    config = algorithm(name, **EVERYTHING)
    for seed in FEW_SEEDS:
        batch = random_batch(seed, torch.float32)
        narrow = {column: getattr(batch, column).detach().to(dtype) for column in COLUMNS}
        narrow["advantages"] = batch.advantages.to(dtype)
        wide = {column: value.float() for column, value in narrow.items()}
        for columns in (narrow, wide):
            columns["logps"].requires_grad_()
            columns["entropies"].requires_grad_()
        found = everything_of(config, replace(batch, **narrow))
        wanted = everything_of(config, replace(batch, **wide))
        assert found[0].dtype == torch.float32
        assert found[1].dtype == dtype
        for left, right in zip(found, wanted, strict=True):
            assert torch.equal(left, right.to(left.dtype))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("log_ratio", [-80.0, -31.0, 31.0, 80.0, -1e4, 1e4])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_extreme_ratios(name, log_ratio, advantage):
    batch = TokenBatch(
        logps=torch.full((2, 2), min(log_ratio, 0.0), requires_grad=True),
        old_logps=torch.full((2, 2), min(-log_ratio, 0.0)),
        mask=torch.ones(2, 2),
        advantages=torch.full((2,), advantage),
        entropies=torch.ones(2, 2, requires_grad=True),
        ref_logps=torch.full((2, 2), min(-log_ratio, 0.0)),
        vocab_size=VOCAB,
    )
    for estimator in ("k1", "k2", "k3"):
        for level in ("token", "sequence"):
            pieces = {"estimator": estimator, "level": level, "bias_correction": True}
            for value in everything_of(algorithm(name, **EVERYTHING, **pieces), batch):
                assert value.isfinite().all()


def test_a_batch_is_left_as_it_was():
    """In-place arithmetic stays inside."""
    batch = random_batch(5)
    before = {column: getattr(batch, column).detach().clone() for column in COLUMNS}
    everything_of(algorithm("sa-ah-abc-grpo", **EVERYTHING), batch)
    for column, value in before.items():
        assert torch.equal(getattr(batch, column).nan_to_num(), value.nan_to_num())


def test_metrics_and_trace_after_backward_and_without_grad():
    batch = random_batch(5)
    objective = Objective(algorithm("sa-ah-abc-grpo", beta=0.1))
    early = objective(batch)
    wanted, trace = early.metrics, early.tokens
    late = objective(batch)
    late.loss.backward()
    assert late.metrics == wanted
    assert torch.equal(late.tokens.weight, trace.weight)
    with torch.no_grad():
        still = objective(batch)
        assert not still.loss.requires_grad
        assert still.metrics == wanted
        assert torch.equal(still.tokens.weight, trace.weight)


def test_float64_advantages_keep_their_precision_in_a_float32_batch():
    batch = random_batch(4, torch.float32)
    wide = replace(batch, advantages=batch.advantages.double())
    narrow_loss, narrow_slope = gradients(algorithm("grpo"), batch)
    loss, slope = gradients(algorithm("grpo"), wide)
    assert slope.dtype == torch.float32
    torch.testing.assert_close(loss.float(), narrow_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, narrow_slope, rtol=1e-5, atol=1e-6)


def test_rollouts_do_not_touch_each_other():
    """A rollout whose own numbers are broken breaks its own gradient only."""
    batch = random_batch(7)
    rows = [row for row in range(len(batch.mask)) if batch.mask[row].any()]
    broken = rows_of(batch, rows)
    place = broken.mask[0].nonzero()[0]
    old_logps = broken.old_logps.clone()
    old_logps[0, place] = math.nan
    config = algorithm("sa-ah-abc-grpo")
    _, slope = gradients(config, replace(broken, old_logps=old_logps))
    _, wanted = gradients(config, broken)
    assert torch.equal(slope[1:], wanted[1:])
