"""Mistakes are refused where they are made, in words that help; presets are what they say."""

import math
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from batches import FEW_SEEDS, random_batch

from asymgrpo import ALGORITHMS, Objective, ObjectiveConfig, TokenBatch, algorithm
from asymgrpo.objective.advantage import group_advantages
from asymgrpo.objective.aggregate import aggregate
from asymgrpo.objective.entropy import top_entropy_threshold
from asymgrpo.objective.horizon import discount, is_discounted
from asymgrpo.objective.kl import kl_divergence
from asymgrpo.objective.masked import masked_sum
from asymgrpo.objective.presets import OVERRIDES, overridden
from asymgrpo.objective.ratio import importance_ratio

NAN, INF = math.nan, math.inf
WORDS = ("baseline", "scale", "applies_to", "normalize", "level", "clip", "estimator", "aggregate")
NUMBERS = ("alpha", "eps_low", "eps_high", "delta", "eps1", "eps2", "eps3", "eps4", "beta")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"eps{n}", value) for n in (1, 2, 3, 4) for value in (-0.1, NAN)),
        *((key, value) for key in ("eps_low", "eps_high") for value in (-1e-9, NAN)),
        *((key, value) for key in ("alpha", "beta") for value in (-0.5, INF, NAN)),
        *((key, v) for key in ("tau_positive", "tau_negative") for v in (0.0, -1.0, INF, NAN)),
        *(("top_entropy", value) for value in (0.0, -0.2, 1.1, NAN)),
        *(("entropy_bonus", value) for value in (INF, -INF, NAN)),
        *((key, "nonsense") for key in WORDS),
        ("alpha", "0.5"),
        ("alpha", True),
        ("alpha", None),
        ("inclusive", 1),
        ("inclusive", "true"),
        ("clip", 0.2),
    ],
)
def test_values_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"^{key} must be .*{re.escape(str(value))}"):
        algorithm("sa-ah-abc-grpo", **{key: value})


@pytest.mark.parametrize("delta", [-1.0, 1.0, 1.2, NAN])
def test_delta_lies_above_the_upper_bound(delta):
    with pytest.raises(ValueError, match=r"^delta must be above 1 \+ eps_high = 1.2"):
        algorithm("dual-clip-grpo", delta=delta)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eps3", INF),
        ("eps2", 1.0),
        ("eps1", 2),
        ("alpha", 0),
        ("beta", 0),
        ("top_entropy", 1),
        ("entropy_bonus", -0.1),
        ("alpha", np.float32(0.25)),
        ("alpha", np.float64(0.25)),
        ("alpha", np.int64(1)),
    ],
)
def test_values_at_the_edge_are_taken_as_numbers(key, value):
    config = algorithm("sa-ah-abc-grpo", **{key: value})
    group = OVERRIDES[key]
    found = getattr(config if group is None else getattr(config, group), key)
    assert type(found) is float
    assert found == value


def test_choices_are_listed():
    with pytest.raises(ValueError, match="clip must be one of ppo, dual, four-boundary, cispo, sa"):
        algorithm("grpo", clip="ppo2")


@pytest.mark.parametrize(
    ("name", "near"),
    [("sa-ah-grp", "sa-ah-grpo"), ("abcgrpo", "abc-grpo"), ("GRPO".lower() + "o", "grpo")],
)
def test_an_unknown_algorithm_names_the_nearest_and_all(name, near):
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}'; did you mean") as caught:
        algorithm(name)
    message = str(caught.value)
    assert near in message.split("?")[0]
    assert all(known in message.split("Valid:")[1] for known in ALGORITHMS)


def test_an_unknown_override_names_the_nearest_and_all():
    with pytest.raises(
        ValueError, match="unknown override 'apply_to'; did you mean applies_to"
    ) as caught:
        algorithm("grpo", apply_to="all")
    assert all(key in str(caught.value).split("Valid:")[1] for key in OVERRIDES)
    with pytest.raises(ValueError, match="unknown override 'zzz'; Valid: "):
        algorithm("grpo", zzz=1)


def test_override_keys_are_the_leaves():
    leaves = set()
    for entry in fields(ObjectiveConfig):
        value = getattr(ObjectiveConfig(), entry.name)
        leaves |= {leaf.name for leaf in fields(value)} if is_dataclass(value) else {entry.name}
    assert set(OVERRIDES) == leaves
    assert {*WORDS, *NUMBERS, "inclusive", "entropy_bonus", "top_entropy"} <= leaves


def test_an_override_changes_its_leaf_and_nothing_else():
    plain = algorithm("sapo")
    changed = algorithm("sapo", applies_to="all", alpha=0.1, tau_negative=2, beta=0.5)
    assert changed.horizon.alpha == 0.1
    assert changed.ratio.tau_negative == 2
    assert changed.kl.beta == 0.5
    assert algorithm("sapo", tau_negative=1.05) == plain == algorithm("sapo")


def test_presets():
    """Each by the leaves in which it differs from GRPO, from its paper."""
    differences = {
        "grpo": {},
        "ah-grpo": {"applies_to": "all"},
        "sa-ah-grpo": {"applies_to": "negative"},
        "abc-grpo": {"clip": "four-boundary"},
        "sa-ah-abc-grpo": {"applies_to": "negative", "clip": "four-boundary"},
        "dapo": {"eps_high": 0.28, "aggregate": "token-mean"},
        "dr-grpo": {"scale": "none", "aggregate": "fixed-length"},
        "gspo": {"level": "sequence", "eps_low": 3e-4, "eps_high": 4e-4},
        "cispo": {"clip": "cispo", "eps_low": 1.0, "eps_high": 4.0, "aggregate": "token-mean"},
        "sapo": {"clip": "sapo"},
        "dual-clip-grpo": {"clip": "dual"},
        "rloo": {
            "baseline": "leave-one-out",
            "scale": "none",
            "clip": "none",
            "aggregate": "fixed-length",
        },
    }
    assert list(ALGORITHMS) == list(differences)
    for name, leaves in differences.items():
        assert algorithm(name) == algorithm("grpo", **leaves)
        assert ALGORITHMS[name].summary
        assert re.fullmatch(r"\d{4}\.\d{5}(, \d{4}\.\d{5})*", ALGORITHMS[name].paper)
    grpo = algorithm("grpo")
    assert (grpo.ratio.clip, grpo.ratio.eps_low, grpo.ratio.eps_high) == ("ppo", 0.2, 0.2)
    assert grpo.horizon.alpha == 0.5
    assert [getattr(grpo.ratio, f"eps{n}") for n in (1, 2, 3, 4)] == [0.2] * 4
    assert (grpo.kl.beta, grpo.top_entropy, grpo.entropy_bonus) == (0.0, 1.0, 0.0)


def test_configurations_and_batches_are_frozen():
    with pytest.raises(FrozenInstanceError):
        algorithm("grpo").horizon.alpha = 1.0
    with pytest.raises(FrozenInstanceError):
        random_batch(0).mask = None


@pytest.mark.parametrize(
    "column",
    [
        *("old_logps", "mask", "advantages", "entropies", "ref_logps"),
        *("sampling_weights", "sampling_logps"),
    ],
)
def test_wrong_shapes_name_the_column(column):
    columns = {
        "logps": torch.zeros(2, 3),
        "old_logps": None,
        "mask": torch.ones(2, 3),
        "advantages": torch.zeros(2),
    }
    for shape in ((3,), (3, 2), (2, 4), (1, 3), (1, 1), (2, 3, 1), ()):
        with pytest.raises(ValueError, match=rf"^{column} must have shape \[B"):
            TokenBatch(**columns | {column: torch.ones(shape)})


def test_logps_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"logps must have shape \[B, T\], got \[3\]"):
        TokenBatch(torch.zeros(3), None, torch.ones(3), torch.zeros(3))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"applies_to": "all"}, "entropies are needed by the horizon"),
        ({"entropy_bonus": 0.1}, "entropies are needed by entropy_bonus"),
        ({"top_entropy": 0.2}, "entropies are needed by top_entropy"),
        ({"beta": 0.04}, "ref_logps are needed by beta = 0.04"),
    ],
)
def test_what_is_needed_is_asked_for(overrides, message):
    batch = TokenBatch(
        torch.zeros(1, 2, requires_grad=True),
        None,
        torch.ones(1, 2),
        torch.ones(1),
        entropy_threshold=torch.tensor(0.5),
    )
    with pytest.raises(ValueError, match=message):
        Objective(algorithm("grpo", **overrides))(batch)


def test_normalisation_asks_for_the_vocabulary():
    for size in (None, 1, 0):
        batch = TokenBatch(
            torch.zeros(1, 2),
            None,
            torch.ones(1, 2),
            torch.ones(1),
            entropies=torch.ones(1, 2),
            vocab_size=size,
        )
        with pytest.raises(ValueError, match="vocab_size"):
            Objective(algorithm("ah-grpo"))(batch)
        Objective(algorithm("ah-grpo", normalize="none"))(batch)


MATRIX, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages(MATRIX, 2), "rewards must have shape"),
        (lambda: group_advantages(torch.zeros(5), 2), "5 rewards do not divide into groups of 2"),
        (lambda: group_advantages(torch.zeros(4), 0), "do not divide into groups of 0"),
        (lambda: group_advantages(torch.zeros(4), 2, baseline="max"), "baseline must be one of"),
        (lambda: group_advantages(torch.zeros(4), 2, scale="max"), "scale must be one of"),
        (lambda: discount(MATRIX, MASK[:, :2], 0.5, 10), "must both be"),
        (lambda: discount(MATRIX, MASK, -0.5, 10), "alpha must be at least 0"),
        (lambda: discount(MATRIX, MASK, NAN, 10), "alpha must be at least 0"),
        (lambda: discount(MATRIX, MASK, 0.5, 10, normalize="max"), "normalize must be one of"),
        (lambda: is_discounted(MATRIX[0], "positive"), "applies_to must be one of"),
        (lambda: importance_ratio(MATRIX, MATRIX, MASK, "word"), "level must be one of"),
        (lambda: kl_divergence(MATRIX, MATRIX, "k4"), "estimator must be one of k1, k2, k3"),
        (lambda: kl_divergence(MATRIX, MATRIX[:1], "k3"), "differ in shape"),
        (lambda: aggregate(MATRIX, MASK, "median"), "aggregate must be one of"),
        (lambda: aggregate(MATRIX, MASK[:1], "token-mean"), "must be"),
        (lambda: masked_sum(MATRIX, MASK.float(), None), "mask must be boolean"),
        (lambda: top_entropy_threshold(MATRIX, 0.5), "must be flat"),
        (lambda: top_entropy_threshold(MATRIX[0], 0.0), r"must be in \(0, 1\]"),
    ],
)
def test_pieces_check_what_they_are_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()


OTHER = {
    "baseline": "leave-one-out",
    "scale": "batch",
    "alpha": 0.9,
    "applies_to": "all",
    "normalize": "none",
    "inclusive": False,
    "level": "sequence",
    "clip": "none",
    "eps_low": 0.05,
    "eps_high": 0.05,
    "delta": 1.5,
    "eps1": 0.9,
    "eps2": 0.9,
    "eps3": 0.9,
    "eps4": 0.9,
    "tau_positive": 2.0,
    "tau_negative": 2.0,
    "beta": 0.1,
    "estimator": "k2",
    "bias_correction": True,
    "aggregate": "sequence-sum",
    "entropy_bonus": 0.1,
    "top_entropy": 0.5,
    "correction": "token-mask",
    "correction_max": 1.1,
    "correction_min": 0.95,
}
"""A value of every leaf that no preset has; for the words, one that most have not."""


def outcome(config: ObjectiveConfig) -> list[float]:
    """All that an objective yields, on batches off their policy: numbers that must differ."""
    rewards = torch.tensor([0.0, 1.0, 3.0, 4.0, 4.0, 9.0])
    numbers = group_advantages(rewards, 3, **vars(config.advantage)).tolist()
    for seed in FEW_SEEDS:
        batch = random_batch(seed, spread=1.0)
        out = Objective(config)(replace(batch, sampling_logps=batch.ref_logps))
        numbers += [out.loss.item(), *out.metrics.values(), *out.tokens.weight.flatten().tolist()]
    return numbers


@pytest.mark.parametrize("key", OTHER)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_override_acts_or_is_an_error(name, key):
    assert OTHER.keys() == OVERRIDES.keys()
    plain = ALGORITHMS[name].config
    group = OVERRIDES[key]
    if getattr(plain if group is None else getattr(plain, group), key) == OTHER[key]:
        return  # the preset says so itself
    changed = overridden(name, {key: OTHER[key]})
    if outcome(changed) != outcome(plain):
        assert algorithm(name, **{key: OTHER[key]}) == changed
        return
    with pytest.raises(ValueError, match=rf"^{key} has no effect with \w+=[\w-]+; set \w+"):
        algorithm(name, **{key: OTHER[key]})


@pytest.mark.parametrize(
    ("name", "overrides", "advice"),
    [
        ("grpo", {"alpha": 0.5}, "set applies_to=all or applies_to=negative"),
        ("grpo", {"delta": 4.0}, "set clip=dual to use it, or eps_low, eps_high for this clip"),
        ("abc-grpo", {"eps_low": 0.2}, "or eps1, eps2, eps3, eps4 for this clip"),
        ("grpo", {"tau_negative": 1.05}, "set clip=sapo"),
        ("rloo", {"eps_high": 0.2}, "set clip=ppo or clip=dual or clip=cispo to use it"),
        ("grpo", {"estimator": "k3"}, "set beta above 0"),
        ("ah-grpo", {"alpha": 0, "inclusive": True}, "set alpha above 0"),
        ("ah-grpo", {"applies_to": "none", "normalize": "vocab"}, "set applies_to=all"),
    ],
)
def test_an_override_that_cannot_act_is_refused_at_its_default_too(name, overrides, advice):
    with pytest.raises(ValueError, match=rf"has no effect with .*{re.escape(advice)}"):
        algorithm(name, **overrides)
