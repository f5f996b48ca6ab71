"""Noise and draws against independent arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from asymgrpo.kernels.decode.token_sampling import (
    Filters,
    draw,
    gumbel_noise,
    kept_logits,
    noise_keys,
)

MASK = (1 << 64) - 1


def splitmix(state):
    """SplitMix64's finaliser in Python's integers."""
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_noise_is_splitmix_in_python_integers():
    golden = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (7, 3), (-5, 1_000), (2**63 - 1, 12)]:
        key = splitmix(splitmix(seed + golden) + position * golden)
        expected = []
        for token in range(1, 9):
            bits = splitmix(key + token * golden) >> 32
            expected.append(-math.log(-math.log1p(-(bits + 0.5) / 2**32)))
        keys = noise_keys(torch.tensor([seed]), torch.tensor([position]))
        assert gumbel_noise(keys, 8)[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_noise_is_gumbel_along_seeds_positions_and_tokens():
    many, one = torch.arange(40_000), torch.zeros(40_000, dtype=torch.long)
    by_seed = gumbel_noise(noise_keys(many, one), 2)
    by_position = gumbel_noise(noise_keys(one, many), 2)
    by_token = gumbel_noise(noise_keys(one[:2], many[:2]), 40_000).T
    for noise in (by_seed, by_position, by_token):
        for column in noise.T:
            assert stats.kstest(column.numpy(), "gumbel_r").pvalue > 1e-3
        assert abs(torch.corrcoef(noise.T)[0, 1]) < 0.02
        assert abs(torch.corrcoef(torch.stack((noise[1:, 0], noise[:-1, 0])))[0, 1]) < 0.02


def test_unlikely_tokens_are_drawn_as_often_as_they_should():
    """Chances of 1e-4: the tail of the noise decides, where float32 is easily too coarse."""
    logits = torch.full((1, 400), math.log(1e-4))
    logits[0, 0] = math.log(1 - 399e-4)
    draws = 40_000
    hits = 0
    for start in range(0, draws, 10_000):
        keys = noise_keys(torch.arange(start, start + 10_000), torch.zeros(1, dtype=torch.long))
        hits += int((draw(logits.expand(10_000, -1), keys, Filters())[0] > 0).sum())
    assert stats.binomtest(hits, draws, 399e-4).pvalue > 1e-3


def test_filters_by_hand():
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()

    def kept(**changes):
        return torch.isfinite(kept_logits(scores, Filters(**changes)))[0].tolist()

    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.7) == [True, True, False, False]
    assert kept(top_p=0.01) == [True, False, False, False]
    assert kept(min_p=0.25) == [True, True, True, False]
    assert kept(top_k=9) == [True] * 4


def test_masked_logits_have_an_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    token, logp, entropy = draw(logits, torch.tensor([3]), Filters())
    assert token.item() in (0, 1)
    assert logp.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


def test_greedy_reports_the_softmax_at_temperature_one():
    logits = torch.tensor([[1.0, 2.0]])
    token, logp, _ = draw(logits, torch.tensor([3]), Filters(temperature=0.1, greedy=True))
    assert token.item() == 1
    assert logp.item() == pytest.approx(-math.log1p(math.exp(-1.0)))
