"""What one objective has in common with another: bit for bit where it is meant to be."""

import math
from dataclasses import replace

import pytest
import torch
from batches import FEW_SEEDS, SEEDS, VOCAB, gradients, random_batch, rows_of

from asymgrpo import ALGORITHMS, Objective, TokenBatch, algorithm
from asymgrpo.objective.aggregate import AGGREGATES
from asymgrpo.objective.ratio import CLIPS

DTYPES = [torch.float32, torch.float64]


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", CLIPS)
def test_alpha_0_is_no_horizon(clip, dtype):
    for seed in FEW_SEEDS:
        batch = random_batch(seed, dtype)
        grpo = gradients(algorithm("grpo", clip=clip), batch)
        for name in ("ah-grpo", "sa-ah-grpo"):
            assert same(gradients(algorithm(name, clip=clip, alpha=0), batch), grpo)
            # The same through the discount itself, not around it.
            assert same(gradients(algorithm(name, clip=clip, alpha=1e-300), batch), grpo)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", CLIPS)
def test_negative_horizon_leaves_positive_rollouts_bit_for_bit(clip, level, dtype):
    changed = 0
    for seed in SEEDS:
        batch = random_batch(seed, dtype)
        pieces = {"clip": clip, "level": level}
        plain, discounted = (algorithm(name, **pieces) for name in ("grpo", "sa-ah-grpo"))
        kept = batch.advantages >= 0
        ours, theirs = gradients(discounted, batch)[1], gradients(plain, batch)[1]
        assert torch.equal(ours[kept], theirs[kept])
        failed = rows_of(batch, ~kept)
        changed += int(failed.mask.sum() > 0 and not torch.equal(ours, theirs))
        for row in kept.nonzero().flatten().tolist():
            alone = rows_of(batch, [row])
            assert same(gradients(discounted, alone), gradients(plain, alone))
        tokens = [Objective(config)(batch).tokens for config in (plain, discounted)]
        assert torch.equal(tokens[0].surrogate[kept], tokens[1].surrogate[kept])
    assert changed > 20  # and the failed ones do change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_four_bounds_that_are_grpo(level, dtype):
    for seed in SEEDS:
        batch = random_batch(seed, dtype, spread=1.5)
        for eps in (0.0, 0.2, 0.7):
            grpo = algorithm("grpo", level=level, eps_low=eps, eps_high=eps)
            bounds = {"eps1": eps, "eps2": 1.0, "eps3": math.inf, "eps4": eps}
            abc = algorithm("abc-grpo", level=level, **bounds)
            assert same(gradients(abc, batch), gradients(grpo, batch))
            ours, theirs = (Objective(config)(batch).tokens for config in (abc, grpo))
            assert torch.equal(ours.surrogate, theirs.surrogate)
            assert torch.equal(ours.clipped, theirs.clipped)


def wide_batch(seed: int, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """Ratios evenly spread in the logarithm, from 1e-3 to 1e3, of both signs."""
    random = torch.Generator().manual_seed(seed)
    log_ratio = torch.rand(8, 60, generator=random, dtype=dtype) * 2 - 1
    old_logps = -torch.rand(8, 60, generator=random, dtype=dtype)
    return TokenBatch(
        logps=(old_logps + log_ratio * math.log(1e3)).requires_grad_(),
        old_logps=old_logps,
        mask=torch.ones(8, 60),
        advantages=torch.randn(8, generator=random, dtype=dtype),
        entropies=torch.rand(8, 60, generator=random, dtype=dtype),
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["abc-grpo", "sa-ah-abc-grpo"])
def test_no_gradient_outside_the_four_bounds(name, dtype):
    seen = set()
    for seed in FEW_SEEDS:
        batch = wide_batch(seed, dtype)
        config = algorithm(name, eps1=0.3, eps2=0.4, eps3=2.0, eps4=0.1)
        _, slope = gradients(config, batch)
        ratio = (batch.logps - batch.old_logps).detach().double().exp()
        positive = (batch.advantages > 0).unsqueeze(1)
        high, low = torch.where(positive, 1.3, 3.0), torch.where(positive, 0.6, 0.9)
        outside = (ratio > high * (1 + 1e-6)) | (ratio < low * (1 - 1e-6))
        inside = (ratio < high * (1 - 1e-6)) & (ratio > low * (1 + 1e-6))
        assert (slope[outside] == 0).all()
        assert (slope[inside] != 0).all()
        seen |= set(Objective(config)(batch).tokens.quadrant[outside].tolist())
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize("eps1", [0.0, 0.2, 1.5])
@pytest.mark.parametrize("eps3", [0.0, 0.2, 1.5])
def test_the_gradient_bound_of_abc(eps1, eps3):
    """|A| (1 + max(eps1, eps3)) for a token; GRPO breaks it wherever A < 0 and r is large."""
    for seed in FEW_SEEDS:
        batch = wide_batch(seed)
        bound = batch.advantages.abs().unsqueeze(1) * (1 + max(eps1, eps3))
        weight = Objective(algorithm("abc-grpo", eps1=eps1, eps3=eps3))(batch).tokens.weight
        assert (weight.abs() <= bound * (1 + 1e-15)).all()
        if (batch.advantages < 0).any():
            unbounded = Objective(algorithm("grpo"))(batch).tokens.weight
            assert (unbounded.abs() > 10 * bound).any()


@pytest.mark.parametrize("name", ["ah-grpo", "sa-ah-grpo", "sa-ah-abc-grpo"])
def test_no_gradient_flows_through_the_discount(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        loss = Objective(algorithm(name))(batch).loss
        assert torch.autograd.grad(loss, batch.entropies, allow_unused=True) == (None,)
        # Entropies that hang on the log-probabilities, as those of a model do.
        attached = replace(batch, entropies=batch.logps.square() * 0.1)
        detached = replace(attached, entropies=attached.entropies.detach())
        assert same(gradients(algorithm(name), attached), gradients(algorithm(name), detached))


def test_top_entropy_selects_without_a_gradient():
    for seed in SEEDS:
        batch = random_batch(seed)
        loss = Objective(algorithm("grpo", top_entropy=0.3))(batch).loss
        assert torch.autograd.grad(loss, batch.entropies, allow_unused=True) == (None,)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_is_old_logps_of_its_own(name):
    for seed in FEW_SEEDS:
        batch = random_batch(seed, torch.float32)
        implied = gradients(algorithm(name), replace(batch, old_logps=None))
        stated = gradients(algorithm(name), replace(batch, old_logps=batch.logps.detach()))
        assert same(implied, stated)


@pytest.mark.parametrize("left", [0, 1, 9])
@pytest.mark.parametrize("right", [0, 1, 23])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_padded_batch_is_its_rollouts_one_at_a_time(name, left, right):
    seed = 17 * left + right
    for aggregate in AGGREGATES:
        if aggregate == "local-token-mean":  # knows no larger batch
            continue
        config = algorithm(name, aggregate=aggregate, beta=0.1)
        batch = random_batch(seed := seed + 1)
        counts = {
            "token_count": float(batch.mask.sum().clamp(min=1)),
            "rollout_count": float(batch.mask.any(1).sum().clamp(min=1)),
            "max_length": batch.mask.shape[1],
        }
        wide = pad(replace(batch, max_length=counts["max_length"]), left, right)
        total, slope = gradients(config, wide)
        outside = torch.ones_like(wide.mask, dtype=torch.bool)
        outside[:, left : left + batch.mask.shape[1]] = False
        assert (slope[outside] == 0).all()
        alone = [
            gradients(config, trimmed(replace(batch, **counts), row))
            for row in range(len(batch.mask))
        ]
        exact = {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close(total, sum(loss for loss, _ in alone), **exact)
        for row, (_, own) in enumerate(alone):
            kept = wide.mask[row].bool()
            torch.testing.assert_close(slope[row, kept], own[0], **exact)


def pad(batch: TokenBatch, left: int, right: int) -> TokenBatch:
    """Garbage columns on both sides."""
    columns = {}
    for name in ("logps", "old_logps", "ref_logps", "entropies", "sampling_weights", "mask"):
        value = getattr(batch, name).detach()
        sides = [value.new_full((len(value), width), 0) for width in (left, right)]
        if name != "mask":
            sides[0].fill_(math.nan)
            sides[1].fill_(-math.inf)
        columns[name] = torch.cat([sides[0], value, sides[1]], 1)
    columns["logps"].requires_grad_()
    return replace(batch, **columns)


def trimmed(batch: TokenBatch, row: int) -> TokenBatch:
    """One rollout, its own tokens only."""
    alone, kept = rows_of(batch, [row]), batch.mask[row].bool()
    columns = {
        name: getattr(alone, name)[:, kept].detach()
        for name in ("logps", "old_logps", "ref_logps", "entropies", "sampling_weights", "mask")
    }
    columns["logps"].requires_grad_()
    return replace(alone, **columns)


def test_top_entropy_of_a_slice_by_a_shared_threshold():
    batch = random_batch(8)
    config = algorithm("dapo", top_entropy=0.4)
    whole, slope = gradients(config, batch)
    kept = batch.entropies.detach()[batch.mask.bool()]
    shared = {
        "entropy_threshold": torch.quantile(kept, 0.6),
        "token_count": float(batch.mask.sum()),
    }
    halves = [
        gradients(config, replace(rows_of(batch, rows), **shared))
        for rows in (slice(0, 2), slice(2, None))
    ]
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.cat([half[1] for half in halves]), slope)
