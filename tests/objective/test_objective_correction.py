"""Corrections for the sampler's log-probs against the loops."""

import math
from dataclasses import replace

import pytest
import torch
from batches import SEEDS, random_batch
from test_objective_loss import FLOAT32, FLOAT64, check, random_pieces

from asymgrpo import Objective, TokenBatch, algorithm
from asymgrpo.objective.config import SamplingConfig
from asymgrpo.objective.correction import CORRECTIONS, sampling_correction

BOUNDS = ((0.0, 2.0), (0.5, 1.5), (0.9, math.inf), (0.0, 1.0))


def with_sampler(batch: TokenBatch, seed: int, unknown: bool = True) -> TokenBatch:
    """The batch with log-probs of a sampler that is off by some, garbage outside the mask."""
    random = torch.Generator().manual_seed(1_000 + seed)
    noise = 0.3 * torch.randn(batch.mask.shape, generator=random, dtype=torch.float64)
    logps = (batch.old_logps.double() + noise).to(batch.logps.dtype)
    if unknown:
        logps[torch.rand(logps.shape, generator=random) < 0.1] = math.nan
    return replace(batch, sampling_logps=logps)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_with_every_piece(correction):
    for seed in SEEDS:
        batch = with_sampler(random_batch(seed), seed)
        low, high = BOUNDS[seed % len(BOUNDS)]
        clip = ("ppo", "four-boundary", "cispo", "sapo", "none")[seed % 5]
        config = random_pieces(clip, ("token", "sequence")[seed % 2], seed)
        chosen = SamplingConfig(correction, correction_max=high, correction_min=low)
        check(replace(config, sampling=chosen), batch, FLOAT64)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_in_float32(correction):
    for seed in SEEDS:
        batch = with_sampler(random_batch(seed, torch.float32), seed)
        check(algorithm("sa-ah-abc-grpo", correction=correction), batch, FLOAT32)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_an_exact_sampler_changes_nothing(correction):
    for seed in SEEDS:
        batch = random_batch(seed)
        batch = replace(batch, sampling_logps=batch.old_logps)
        plain = Objective(algorithm("grpo"))(batch).loss
        assert Objective(algorithm("grpo", correction=correction))(batch).loss == plain


def test_weights_have_no_gradient():
    """The weight is of the old policy, also where the old policy is the current one."""
    logps = torch.full((1, 2), -1.0, requires_grad=True)
    drawn = torch.tensor([[-1.0 + math.log(2), -1.0]])
    batch = TokenBatch(logps, None, torch.ones(1, 2), torch.ones(1), sampling_logps=drawn)
    out = Objective(algorithm("grpo", correction="token-truncate"))(batch)
    (slope,) = torch.autograd.grad(out.loss, logps)
    # -A w r / T, with w = 1/2 and 1
    torch.testing.assert_close(slope, torch.tensor([[-0.25, -0.5]]))


def test_the_importance_identity():
    """Token weights make a mean under q one under pi, where nothing is cut."""
    random = torch.Generator().manual_seed(0)
    pi, q = (torch.rand(5, generator=random).double().add(0.2) for _ in range(2))
    pi, q = pi / pi.sum(), q / q.sum()
    weights = sampling_correction(
        pi.log()[:, None], q.log()[:, None], torch.ones(5, 1), "token-truncate", high=math.inf
    )
    values = torch.arange(5.0).double()
    assert (q * weights[:, 0] * values).sum().item() == pytest.approx((pi * values).sum().item())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="correction must be one of none, token-truncate"):
        algorithm("grpo", correction="tis")
    with pytest.raises(ValueError, match=r"correction_max must be at least 0\.5"):
        algorithm("grpo", correction="token-mask", correction_min=0.5, correction_max=0.4)
    with pytest.raises(ValueError, match="sampling_logps are needed by sequence-mask"):
        Objective(algorithm("grpo", correction="sequence-mask"))(random_batch(0))
    with pytest.raises(ValueError, match="sampling_logps must have the shape of old_logps"):
        sampling_correction(torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3), "token-mask")
