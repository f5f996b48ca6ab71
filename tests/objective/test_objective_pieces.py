"""Each piece against its loop over 50 random ragged batches, derivatives too."""

import math
from fractions import Fraction

import pytest
import torch
from batches import SEEDS, VOCAB, padded, random_batch, rollouts_of

import reference
from asymgrpo.objective.advantage import (
    equal_groups,
    group_advantages,
    normalized_sum_advantages,
    total_reward,
)
from asymgrpo.objective.aggregate import AGGREGATES, aggregate
from asymgrpo.objective.config import RatioConfig
from asymgrpo.objective.entropy import top_entropy_threshold
from asymgrpo.objective.horizon import discount, is_discounted
from asymgrpo.objective.kl import ESTIMATORS, kl_divergence
from asymgrpo.objective.masked import masked_mean, masked_sum
from asymgrpo.objective.ratio import CLIPS, importance_ratio, quadrants

EXACT = {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_advantages(baseline, scale):
    for seed in SEEDS:
        random = torch.Generator().manual_seed(seed)
        prompts, group = (int(torch.randint(1, 6, (), generator=random)) for _ in range(2))
        rewards = torch.randn(prompts * group, generator=random, dtype=torch.float64)
        rewards[torch.rand(len(rewards), generator=random) < 0.2] = math.nan
        rewards[:group] = rewards[0].nan_to_num(0.1)  # one group without variance
        rewards[group : 2 * group] = math.nan  # and one without scores
        found = group_advantages(rewards, group, baseline, scale)
        wanted = reference.advantages(rewards.tolist(), group, baseline, scale)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), **EXACT)


def test_equal_rewards_have_advantage_0_and_no_sign():
    for value in (0.1, 0.7, -1 / 3):
        for group in range(1, 12):
            rewards = torch.full((group,), value)
            for scale in ("group", "batch", "none"):
                assert not group_advantages(rewards, group, "mean", scale).any()
                assert not group_advantages(rewards, group, "leave-one-out", scale).any()


def test_rewards_equal_up_to_rounding_have_advantage_0():
    """Two functions whose totals are equal, but not in float32, where 0.1 + 0.6 is not 0.7."""
    terms = torch.tensor([[0.1, 0.6], [0.7, 0.0], [0.3, 0.4], [0.2, 0.5]])
    totals, rounding = total_reward(terms, torch.ones(2))
    assert len(totals.unique()) > 1  # else there is nothing to see
    for baseline in ("mean", "leave-one-out"):
        for scale in ("group", "batch", "none"):
            assert not group_advantages(totals, 4, baseline, scale, rounding).any()
    assert equal_groups(totals, 4, rounding).tolist() == [True]


def test_a_reward_at_its_baseline_has_no_sign():
    # 0.2 is the mean of 0.1, 0.2 and 0.3, but not in float32.
    found = group_advantages(torch.tensor([0.1, 0.2, 0.3]), 3, scale="none")
    assert found.tolist() == [pytest.approx(-0.1), 0.0, pytest.approx(0.1)]


def test_rounding_is_told_from_a_difference():
    """Totals of random terms against exact fractions: 0 just where the exact advantage is 0."""
    for seed in SEEDS:
        random = torch.Generator().manual_seed(seed)
        functions = int(torch.randint(1, 6, (), generator=random))
        cents = torch.randint(0, 30, (12, functions), generator=random)
        weights = torch.randint(1, 10, (functions,), generator=random)
        exact = [
            sum(
                Fraction(c, 100) * Fraction(w, 10)
                for c, w in zip(row, weights.tolist(), strict=True)
            )
            for row in cents.tolist()
        ]
        totals, rounding = total_reward(cents / 100, weights / 10)
        assert all(
            abs(Fraction(total) - wanted) <= Fraction(bound)
            for total, wanted, bound in zip(totals.tolist(), exact, rounding.tolist(), strict=True)
        )
        found = group_advantages(totals, 4, scale="none", rounding=rounding).tolist()
        for start in range(0, 12, 4):
            mean = sum(exact[start : start + 4]) / 4
            for index in range(start, start + 4):
                assert (found[index] == 0) == (exact[index] == mean)
                assert found[index] == pytest.approx(float(exact[index] - mean), rel=1e-5, abs=0)
        flat = [len(set(exact[start : start + 4])) == 1 for start in range(0, 12, 4)]
        assert equal_groups(totals, 4, rounding).tolist() == flat


def test_normalized_sums_are_trls():
    """Each function's advantages by the loop, summed with weights, then scaled over the batch."""
    for seed in SEEDS:
        random = torch.Generator().manual_seed(seed)
        rewards = torch.randn(12, 3, generator=random, dtype=torch.float64)
        rewards[torch.rand(12, 3, generator=random) < 0.2] = math.nan
        rewards[0] = math.nan  # a rollout that no function scores
        weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
        found = normalized_sum_advantages(rewards, weights, 4)
        columns = [reference.advantages(c.tolist(), 4, "mean", "group") for c in rewards.unbind(1)]
        sums = [
            math.nan
            if rewards[row].isnan().all()
            else sum(w * c[row] for w, c in zip(weights.tolist(), columns, strict=True))
            for row in range(12)
        ]
        wanted = reference.advantages(sums, 12, "mean", "group")
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), **EXACT)
    level = torch.full((7, 2), 0.7)
    assert not normalized_sum_advantages(level, torch.ones(2), 7).any()


def test_advantages_by_hand():
    # (1 - 0.5) / (sqrt(0.5) + 1e-4), and the failed one its mirror image; 3 - (0 + 0) / 2 = 3.
    found = group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2)
    step = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert found.tolist() == pytest.approx([step, -step], 1e-12)
    left_out = group_advantages(torch.tensor([3.0, 0.0, 0.0]), 3, "leave-one-out", "none")
    assert left_out.tolist() == [3.0, -1.5, -1.5]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_advantages_of_narrow_rewards_are_computed_in_float32(dtype):
    rewards = torch.tensor([1, 0, 0, 1, 1, 1])
    found = group_advantages(rewards.to(dtype), 3)
    assert found.dtype == torch.float32
    assert torch.equal(found, group_advantages(rewards.float(), 3))


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("normalize", ["vocab", "none"])
def test_discount(normalize, inclusive):
    for seed in SEEDS:
        batch = random_batch(seed)
        for alpha in (0.0, 0.5, 3.0):
            found = discount(batch.entropies, batch.mask.bool(), alpha, VOCAB, normalize, inclusive)
            wanted = [
                reference.discounts(rollout.entropies, alpha, VOCAB, normalize, inclusive)
                for rollout in rollouts_of(batch)
            ]
            torch.testing.assert_close(found, padded(wanted, batch.mask), **EXACT)
            assert not found.requires_grad


def test_discount_applies_by_sign():
    advantages = torch.tensor([-2.0, -0.0, 0.0, 1.0])
    assert is_discounted(advantages, "none").tolist() == [False] * 4
    assert is_discounted(advantages, "all").tolist() == [True] * 4
    assert is_discounted(advantages, "negative").tolist() == [True, False, False, False]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratio(level):
    for seed in SEEDS:
        batch = random_batch(seed).cleaned()
        found = importance_ratio(batch.logps, batch.old_logps, batch.mask, level)
        assert found.shape == (len(batch.mask), 1 if level == "sequence" else batch.mask.shape[1])
        wanted = [
            reference.ratios(rollout.logps, rollout.old_logps, level)
            for rollout in rollouts_of(batch)
        ]
        found = torch.where(batch.mask, found, 0.0)
        torch.testing.assert_close(found.detach(), padded(wanted, batch.mask), **EXACT)


RATIOS = [
    RatioConfig(clip="ppo", eps_low=0.2, eps_high=0.28),
    RatioConfig(clip="dual", delta=1.7),
    RatioConfig(clip="four-boundary", eps1=0.3, eps2=0.4, eps3=0.5, eps4=0.1),
    RatioConfig(clip="four-boundary", eps2=1.0, eps3=math.inf),
    RatioConfig(clip="cispo", eps_low=0.5, eps_high=0.7),
    RatioConfig(clip="sapo", tau_positive=0.7, tau_negative=1.6),
    RatioConfig(clip="none"),
]


@pytest.mark.parametrize("config", RATIOS, ids=lambda c: f"{c.clip}-{c.eps3}")
def test_surrogate_and_its_derivative(config):
    settings = reference.Settings(**vars(config))
    for seed in SEEDS:
        batch = random_batch(seed, spread=0.8).cleaned()
        logps = batch.logps.detach().requires_grad_()
        ratio = importance_ratio(logps, batch.old_logps, batch.mask, "token")
        value = CLIPS[config.clip].surrogate(ratio, batch.advantages.unsqueeze(1), logps, config)
        (slope,) = torch.autograd.grad(value.sum(), logps)
        quadrant = quadrants(ratio, batch.advantages.unsqueeze(1), config)
        values, slopes, numbers = [], [], []
        for rollout in rollouts_of(batch):
            rs = reference.ratios(rollout.logps, rollout.old_logps, "token")
            parts = [
                reference.surrogate(settings, r, rollout.advantage, logp)
                for r, logp in zip(rs, rollout.logps, strict=True)
            ]
            values.append([part[0] for part in parts])
            slopes.append(
                [by_r * r + direct for (_, by_r, direct), r in zip(parts, rs, strict=True)]
            )
            numbers.append([reference.quadrant(settings, r, rollout.advantage) for r in rs])
        value, slope, quadrant = (torch.where(batch.mask, x, 0) for x in (value, slope, quadrant))
        torch.testing.assert_close(value.detach(), padded(values, batch.mask), **EXACT)
        torch.testing.assert_close(slope, padded(slopes, batch.mask), **EXACT)
        assert torch.equal(quadrant.double(), padded(numbers, batch.mask))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_and_its_derivative(estimator):
    for seed in SEEDS:
        batch = random_batch(seed, spread=2.0).cleaned()
        logps = batch.logps.detach().requires_grad_()
        value = kl_divergence(logps, batch.ref_logps, estimator)
        (slope,) = torch.autograd.grad(value.sum(), logps)
        pairs = [
            [
                reference.kl(estimator, logp, ref)
                for logp, ref in zip(rollout.logps, rollout.ref_logps, strict=True)
            ]
            for rollout in rollouts_of(batch)
        ]
        for found, place in ((value.detach(), 0), (slope, 1)):
            wanted = padded([[pair[place] for pair in row] for row in pairs], batch.mask)
            torch.testing.assert_close(torch.where(batch.mask, found, 0.0), wanted, **EXACT)


@pytest.mark.parametrize("how", AGGREGATES)
def test_aggregate_and_its_derivative(how):
    for seed in SEEDS:
        batch = random_batch(seed)
        mask = batch.mask.bool()
        losses = batch.old_logps.clone().requires_grad_()  # any numbers, with garbage around them
        found = aggregate(losses, mask, how)
        (slope,) = torch.autograd.grad(found, losses)
        lengths = mask.sum(1).tolist()
        shares = reference.shares(lengths, how, mask.shape[1])
        rows = [rollout.old_logps for rollout in rollouts_of(batch)]
        wanted = sum(share * sum(row) for share, row in zip(shares, rows, strict=True))
        torch.testing.assert_close(found.item(), float(wanted), **EXACT)
        flat = [[share] * length for share, length in zip(shares, lengths, strict=True)]
        torch.testing.assert_close(slope, padded(flat, mask), **EXACT)


@pytest.mark.parametrize("how", AGGREGATES)
def test_aggregate_divides_by_stated_counts(how):
    losses, mask = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    counts = {"token_count": 10.0, "rollout_count": torch.tensor(4), "max_length": 5}
    # 2 whole rollouts of 4; 5 tokens of 10; 5 tokens of 4 x 5; 5 of its own 5; 5 by 4 rollouts.
    wanted = {"sequence-mean": 0.5, "token-mean": 0.5, "fixed-length": 0.25}
    wanted |= {"local-token-mean": 1.0, "sequence-sum": 1.25}
    assert aggregate(losses, mask, how, **counts).item() == wanted[how]


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.77, 1.0])
def test_top_entropy_threshold(fraction):
    for seed in SEEDS:
        values = random_batch(seed).entropies.detach()[random_batch(seed).mask.bool()]
        found = top_entropy_threshold(values, fraction).item()
        assert found == pytest.approx(reference.entropy_threshold(values.tolist(), fraction), 1e-13)
        if len(values):
            quantile = torch.quantile(values, 1 - fraction).item()
            assert found == pytest.approx(quantile, 1e-13)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_masked_sums_and_means(dim):
    for seed in SEEDS:
        batch = random_batch(seed)
        mask = batch.mask.bool()
        values = padded([rollout.old_logps for rollout in rollouts_of(batch)], mask)
        count = mask.sum() if dim is None else mask.sum(dim)
        total = values.sum() if dim is None else values.sum(dim)
        found = masked_sum(batch.old_logps, mask, dim), masked_mean(batch.old_logps, mask, dim)
        torch.testing.assert_close(found[0], total, **EXACT)
        torch.testing.assert_close(found[1], total / count.clamp(min=1), **EXACT)
