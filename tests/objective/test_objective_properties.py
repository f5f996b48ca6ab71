"""Any combination of pieces, on any numbers a policy can produce: finite loss, finite gradients."""

import math
from dataclasses import asdict

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asymgrpo import ALGORITHMS, Objective, ObjectiveConfig, TokenBatch, algorithm
from asymgrpo.objective.advantage import BASELINES, SCALES, group_advantages
from asymgrpo.objective.aggregate import AGGREGATES
from asymgrpo.objective.correction import CORRECTIONS
from asymgrpo.objective.horizon import APPLIES_TO, NORMALIZATIONS
from asymgrpo.objective.kl import ESTIMATORS
from asymgrpo.objective.presets import overridden
from asymgrpo.objective.ratio import CLIPS, LEVELS

GROUP, PROMPTS, TOKENS = 3, 2, 4
ROLLOUTS = GROUP * PROMPTS

bound = st.one_of(st.floats(0, 10), st.just(math.inf))
configs = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(tuple(BASELINES)),
        "scale": st.sampled_from(tuple(SCALES)),
        "alpha": st.floats(0, 1e3),
        "applies_to": st.sampled_from(tuple(APPLIES_TO)),
        "normalize": st.sampled_from(tuple(NORMALIZATIONS)),
        "inclusive": st.booleans(),
        "level": st.sampled_from(tuple(LEVELS)),
        "clip": st.sampled_from(tuple(CLIPS)),
        "eps_low": bound,
        "eps_high": st.floats(0, 10),
        "delta": st.one_of(st.floats(11.01, 100), st.just(math.inf)),
        "eps1": bound,
        "eps2": bound,
        "eps3": bound,
        "eps4": bound,
        "tau_positive": st.floats(0.01, 100),
        "tau_negative": st.floats(0.01, 100),
        "beta": st.floats(0, 10),
        "estimator": st.sampled_from(tuple(ESTIMATORS)),
        "bias_correction": st.booleans(),
        "aggregate": st.sampled_from(tuple(AGGREGATES)),
        "entropy_bonus": st.floats(-1, 1),
        "top_entropy": st.floats(0.01, 1),
        "correction": st.sampled_from(tuple(CORRECTIONS)),
        "correction_max": st.one_of(st.floats(1, 10), st.just(math.inf)),
        "correction_min": st.floats(0, 1),
    }
)


def grid(values: st.SearchStrategy) -> st.SearchStrategy:
    """[B, T] nested lists."""
    row = st.lists(values, min_size=TOKENS, max_size=TOKENS)
    return st.lists(row, min_size=ROLLOUTS, max_size=ROLLOUTS)


# Beside the even spread, the corners: certain tokens, ones that went from certain to impossible.
logp = st.one_of(st.floats(-80, 0, width=32), st.sampled_from((0.0, -80.0, -1e-30)))
entropy = st.one_of(st.floats(0, 12, width=32), st.just(0.0))
batches = st.fixed_dictionaries(
    {
        "logps": grid(logp),
        "old_logps": st.one_of(st.none(), grid(logp)),
        "ref_logps": grid(logp),
        "entropies": grid(entropy),
        "sampling_weights": st.one_of(st.none(), grid(st.floats(0, 10, width=32))),
        "sampling_logps": grid(st.one_of(logp, st.just(math.nan))),
        "mask": grid(st.booleans()),
    }
)
rewards = st.lists(
    st.one_of(st.sampled_from((0.0, 1.0, math.nan)), st.floats(-10, 10, width=32)),
    min_size=ROLLOUTS,
    max_size=ROLLOUTS,
)


def leaves(config: ObjectiveConfig) -> dict[str, object]:
    nested = asdict(config)
    top = {key: value for key, value in nested.items() if not isinstance(value, dict)}
    return top | {
        k: v for group in nested.values() if isinstance(group, dict) for k, v in group.items()
    }


@settings(max_examples=300, deadline=None)
@given(configs, batches, rewards)
def test_every_combination_is_finite(overrides, columns, scores):
    config = overridden("grpo", overrides)
    assert leaves(config) == overrides  # so that nothing drawn is lost on the way
    tensors = {
        name: None if value is None else torch.tensor(value) for name, value in columns.items()
    }
    tensors["logps"].requires_grad_()
    tensors["entropies"].requires_grad_()
    advantages = group_advantages(
        torch.tensor(scores), GROUP, config.advantage.baseline, config.advantage.scale
    )
    out = Objective(config)(TokenBatch(advantages=advantages, vocab_size=32, **tensors))
    inputs = [tensors["logps"], tensors["entropies"]]
    found = torch.autograd.grad(out.loss, inputs, allow_unused=True)
    assert advantages.isfinite().all()
    assert out.loss.isfinite()
    assert all(slope is None or slope.isfinite().all() for slope in found)
    assert all(column.isfinite().all() for column in vars(out.tokens).values())
    assert all(math.isfinite(value) for value in out.metrics.values())
    assert (found[0][~tensors["mask"]] == 0).all()
    assert ((out.tokens.discount >= 0) & (out.tokens.discount <= 1)).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), batches, st.permutations(range(ROLLOUTS)))
def test_the_order_of_rollouts_does_not_matter(name, columns, order):
    tensors = {
        key: None if value is None else torch.tensor(value, dtype=torch.float64)
        for key, value in columns.items()
    }
    advantages = torch.linspace(-1, 1, ROLLOUTS, dtype=torch.float64)
    objective = Objective(algorithm(name))

    def evaluate(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, float]:
        picked = {key: None if v is None else v[rows].clone() for key, v in tensors.items()}
        picked["logps"].requires_grad_()
        batch = TokenBatch(advantages=advantages[rows], vocab_size=32, **picked)
        out = objective(batch)
        largest = out.tokens.surrogate.abs().max().item()
        return out.loss, torch.autograd.grad(out.loss, picked["logps"])[0], largest

    loss, slope, largest = evaluate(list(range(ROLLOUTS)))
    shuffled, permuted, _ = evaluate(list(order))
    # Sums may run in another order: their error is that of the largest term, which may cancel.
    atol = 1e-14 * max(1.0, largest)
    torch.testing.assert_close(shuffled, loss, rtol=1e-12, atol=atol)
    torch.testing.assert_close(permuted, slope[list(order)], rtol=1e-12, atol=0)
