"""The composed objective against the loops: loss, gradients, metrics and trace."""

import random
from dataclasses import replace

import pytest
import torch
from batches import FEW_SEEDS, SEEDS, expected, padded, random_batch, rows_of

from asymgrpo import ALGORITHMS, Objective, ObjectiveConfig, TokenBatch, algorithm
from asymgrpo.objective.aggregate import AGGREGATES
from asymgrpo.objective.presets import overridden
from asymgrpo.objective.ratio import CLIPS

FLOAT64 = {"rtol": 1e-11, "atol": 1e-13}
# Float32 keeps 24 bits; a log-ratio is the difference of numbers up to some 10, a loss the sum of
# terms of either sign.
FLOAT32 = {"rtol": 2e-5, "atol": 1e-6}


def random_pieces(clip: str, level: str, seed: int) -> ObjectiveConfig:
    """A configuration with every other leaf drawn, each aggregation in its turn."""
    draw = random.Random(f"{clip} {level} {seed}")
    aggregates = list(AGGREGATES)
    bounds = {key: draw.choice((0.05, 0.2, 0.5)) for key in ("eps1", "eps2", "eps3", "eps4")}
    pieces = dict(
        clip=clip,
        level=level,
        aggregate=aggregates[seed % len(aggregates)],
        alpha=draw.choice((0.0, 0.5, 2.0)),
        applies_to=draw.choice(("none", "all", "negative")),
        normalize=draw.choice(("vocab", "none")),
        inclusive=draw.random() < 0.5,
        eps_low=draw.choice((0.1, 0.2, 1.0)),
        eps_high=draw.choice((0.2, 0.28, 0.6)),
        delta=draw.choice((1.7, 4.0)),
        tau_positive=draw.choice((0.5, 1.0)),
        tau_negative=draw.choice((1.05, 3.0)),
        beta=draw.choice((0.0, 0.04, 1.0)),
        estimator=draw.choice(("k1", "k2", "k3")),
        bias_correction=draw.random() < 0.5,
        entropy_bonus=draw.choice((0.0, 0.01, -0.3)),
        top_entropy=draw.choice((1.0, 0.6, 0.2)),
        **bounds,
    )
    return overridden("grpo", pieces)


def random_options(batch: TokenBatch, seed: int) -> TokenBatch:
    """The same batch with or without what is optional."""
    draw = random.Random(seed)
    weights = draw.choice((None, batch.sampling_weights, "by rollout"))
    if weights == "by rollout":
        weights = torch.linspace(0.5, 2, len(batch.mask), dtype=batch.logps.dtype).unsqueeze(1)
    return replace(
        batch,
        sampling_weights=weights,
        old_logps=draw.choice((batch.old_logps, batch.old_logps, None)),
        max_length=draw.choice((None, 20)),
        mask=batch.mask.to(draw.choice((torch.bool, torch.int64, torch.float32))),
    )


def check(config: ObjectiveConfig, batch: TokenBatch, tolerance: dict[str, float]) -> None:
    out = Objective(config)(batch)
    wanted = expected(config, batch)
    inputs = [batch.logps, batch.entropies]
    found = torch.autograd.grad(out.loss, inputs, allow_unused=True)
    zero = torch.zeros_like(batch.logps)
    by_logps, by_entropies = (zero if slope is None else slope for slope in found)
    torch.testing.assert_close(out.loss.item(), wanted.loss, **tolerance)
    for slope, rows in (
        (by_logps, wanted.logps_gradient),
        (by_entropies, wanted.entropies_gradient),
    ):
        torch.testing.assert_close(slope.double(), padded(rows, batch.mask), **tolerance)
    for name, rows in wanted.trace.items():
        column = getattr(out.tokens, name)
        torch.testing.assert_close(
            column.double(),
            padded(rows, batch.mask),
            **tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert out.metrics.keys() == wanted.metrics.keys()
    for name, value in wanted.metrics.items():
        assert out.metrics[name] == pytest.approx(
            value, rel=tolerance["rtol"], abs=tolerance["atol"]
        ), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", CLIPS)
def test_every_composition_in_float64(clip, level):
    for seed in SEEDS:
        batch = random_options(random_batch(seed), seed)
        check(random_pieces(clip, level, seed), batch, FLOAT64)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_in_float32(name):
    for seed in SEEDS:
        check(algorithm(name), random_options(random_batch(seed, torch.float32), seed), FLOAT32)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_far_off_policy(name):
    """Log-ratios up to some 15, within which nothing is held back."""
    for seed in FEW_SEEDS:
        check(algorithm(name), random_batch(seed, spread=4.0), FLOAT64)


def test_the_gradient_is_minus_the_weight_under_the_aggregation():
    for name in ALGORITHMS:
        batch = random_batch(3)
        config = replace(algorithm(name), aggregate="token-mean")
        out = Objective(config)(batch)
        (slope,) = torch.autograd.grad(out.loss, batch.logps)
        torch.testing.assert_close(slope, -out.tokens.weight / batch.mask.sum(), **FLOAT64)


def test_quadrants_are_counted_under_every_algorithm():
    """Hand-made: one token beyond each threshold and one within, of each sign."""
    ratios = torch.tensor([[1.3, 0.7, 1.0], [0.7, 1.3, 1.0], [1.3, 0.7, 1.0]], dtype=torch.float64)
    batch = TokenBatch(
        logps=ratios.log().requires_grad_(),
        old_logps=torch.zeros(3, 3, dtype=torch.float64),
        mask=torch.ones(3, 3),
        advantages=torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64),
        entropies=torch.ones(3, 3, dtype=torch.float64),
        vocab_size=50,
    )
    for name in ALGORITHMS:
        out = Objective(algorithm(name, level="token"))(batch)
        assert out.tokens.quadrant.tolist() == [[1, 2, 0], [3, 4, 0], [0, 0, 0]]
        assert [out.metrics[f"clip/q{q}"] for q in (1, 2, 3, 4)] == [1 / 9] * 4


def test_metrics_by_hand():
    """Two rollouts of two tokens, entropy log V each: at alpha = log 2, D is 1/2, then 1/4."""
    batch = TokenBatch(
        logps=torch.full((2, 2), -1.0, requires_grad=True),
        old_logps=None,
        mask=torch.ones(2, 2),
        advantages=torch.tensor([2.0, -1.0]),
        entropies=torch.full((2, 2), torch.log(torch.tensor(10.0)).item()),
        vocab_size=10,
    )
    out = Objective(algorithm("sa-ah-grpo", alpha=torch.log(torch.tensor(2.0)).item()))(batch)
    # Surrogates 2, 2 and -1/2, -1/4: -(4/2 - 0.75/2) / 2.
    assert out.loss.item() == pytest.approx(-0.8125, rel=1e-6)
    assert out.metrics["horizon/effective"] == pytest.approx(0.375, rel=1e-6)
    assert out.metrics["horizon/removed"] == pytest.approx(0.625, rel=1e-6)  # 1.25 of 2
    assert out.metrics["ratio/mean"] == out.metrics["ratio/max"] == 1.0
    assert "kl/mean" not in out.metrics


def test_sums_of_two_halves_are_those_of_the_whole():
    for seed in SEEDS:
        batch = random_batch(seed)
        if len(batch.mask) < 2:
            continue
        objective = Objective(algorithm("sa-ah-abc-grpo", beta=0.1))
        whole = objective(batch).sums
        parts = [objective(rows_of(batch, rows)).sums for rows in (slice(0, 1), slice(1, None))]
        torch.testing.assert_close(parts[0].totals + parts[1].totals, whole.totals, **FLOAT64)
        assert max(part.largest_ratio for part in parts) == whole.largest_ratio
