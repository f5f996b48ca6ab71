"""TRL's options under our objective: each keeps its meaning or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from asymgrpo import ALGORITHMS, algorithm
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer
from asymgrpo.training.trl_options import FIELDS
from small import make_model, make_tokenizer
from test_trl_parity import (
    PROMPTS,
    build,
    off_policy_inputs,
    reward_digits,
    saved_model,
    settings,
)

__all__ = ["saved_model"]


def final_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"peft_config": LoraConfig(r=4, target_modules="all-linear")}, id="lora"),
        pytest.param({"num_iterations": 2}, id="two-iterations"),
        pytest.param({"steps_per_generation": 4}, id="four-mini-batches"),
        pytest.param({"beta": 0.05}, id="reference"),
        pytest.param({"mask_truncated_completions": True}, id="mask-truncated"),
        pytest.param({"gradient_accumulation_steps": 2, "aggregate": "token-mean"}, id="tokens"),
        pytest.param({"entropy_coef": 0.01}, id="entropy-bonus"),
        pytest.param({"use_adaptive_entropy": True, "entropy_target": 10.0}, id="adaptive"),
        pytest.param({"top_entropy": 0.3}, id="top-entropy"),
        pytest.param({"off_policy_mask_threshold": 0.1, "num_iterations": 2}, id="off-policy"),
    ],
)
def test_options_train_three_steps(
    changes: dict[str, Any], saved_model: str, tmp_path: Path
) -> None:
    trainer = build("ours", tmp_path, "sa-ah-abc-grpo", model=saved_model, **changes)
    before = final_weights(trainer)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert trainer.state.global_step == 3
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
    trainable = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert moved <= trainable
    names = {"entropy/mean", "clip/q1", "clip/q4", "ratio/mean", "reward/mean", "gradient/norm"}
    seen = {name for row in rows for name in row}
    assert names | {"horizon/effective", "time/update", "length/mean"} <= seen
    assert {"reward", "entropy", "completions/mean_length", "clip_ratio/low_mean"} <= seen
    if "num_iterations" in changes:  # the second pass over a batch is off-policy
        assert any(row["ratio/max"] > 1.001 for row in rows)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"loss_type": "dapo", "algorithm": "dr-grpo"}, "contradicts the objective 'dr-grpo'"),
        ({"loss_type": "sapo", "algorithm": "abc-grpo"}, "contradicts the objective 'abc-grpo'"),
        ({"loss_type": "vespo"}, "choose from grpo, dapo, .*or train it with trl.GRPOTrainer"),
        ({"vespo_k_pos": 1.0}, "leave it out, or train with trl.GRPOTrainer"),
        ({"epsilon": 0.1, "algorithm": "dapo"}, "set eps_low and eps_high instead"),
        ({"epsilon": 0.1, "algorithm": "abc-grpo"}, "or eps1, eps2, eps3, eps4 for this clip"),
        ({"epsilon_high": 0.3, "eps_high": 0.1}, "epsilon_high=0.3 and eps_high=0.1 differ"),
        ({"scale_rewards": "none", "scale": "batch"}, "scale_rewards='none' and scale='batch'"),
        ({"sapo_temperature_neg": 2.0}, "set clip=sapo to use it"),
        ({"delta": 2.0, "algorithm": "abc-grpo"}, "delta has no effect with clip=four-boundary"),
        ({"delta": 2.0, "clip": "ppo"}, "set clip=dual to use it"),
        ({"alpha": 0.5}, "set applies_to=all or applies_to=negative"),
        ({"eps_low": 0.2, "algorithm": "abc-grpo"}, "eps_low has no effect"),
        ({"tau_positive": 1.0}, "tau_positive has no effect with clip=ppo"),
        ({"estimator": "k2"}, "estimator has no effect with beta=0"),
        ({"entropy_coef": 0.1, "entropy_bonus": 0.2}, "set one of them"),
        ({"algorithm": "grppo"}, "did you mean grpo"),
        ({"alpha": -1.0}, "alpha must be at least 0"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "baseline": "leave-one-out"},
            "leave baseline and scale unset",
        ),
    ],
)
def test_contradictions_say_what_to_set(
    changes: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=advice):
        AsymGRPOConfig(**settings(tmp_path, **changes))


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"loss_type": "dapo"}, {"aggregate": "token-mean"}),
        ({"loss_type": "dr_grpo"}, {"aggregate": "fixed-length"}),
        ({"loss_type": "bnpo"}, {"aggregate": "local-token-mean"}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, {"clip": "sapo", "tau_negative": 2.0}),
        ({"epsilon": 0.1}, {"eps_low": 0.1, "eps_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"eps_low": 0.1, "eps_high": 0.3}),
        ({"top_entropy_quantile": 0.2}, {"top_entropy": 0.2}),
        ({"importance_sampling_level": "sequence"}, {"level": "sequence"}),
        ({"scale_rewards": False}, {"scale": "none"}),
        ({"delta": 2.0}, {"clip": "dual", "delta": 2.0}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"clip": "cispo", "eps_low": 1.0, "eps_high": 4.0, "aggregate": "token-mean"},
        ),
        ({"epsilon": 0.2, "scale_rewards": True, "loss_type": "grpo"}, {}),  # TRL's defaults
    ],
)
def test_trls_options_are_overrides(
    options: dict[str, Any], pieces: dict[str, Any], tmp_path: Path
) -> None:
    config = AsymGRPOConfig(**settings(tmp_path, **options))
    wanted = algorithm("grpo", **pieces)
    assert replace(config.objective(), kl=wanted.kl) == wanted
    # What the fields hold afterwards says the same again.
    names = (*FIELDS, "delta")
    again = {name: getattr(config, name) for name in names}
    assert AsymGRPOConfig(**settings(tmp_path, **again)).objective() == config.objective()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_config_can_be_made_again_from_itself(algorithm: str, tmp_path: Path) -> None:
    """What the objective implies is no contradiction when it is said."""
    config = AsymGRPOConfig(**settings(tmp_path, algorithm=algorithm))
    implied = {
        name: getattr(config, name)
        for name in (
            "loss_type",
            "epsilon",
            "epsilon_high",
            "importance_sampling_level",
            "scale_rewards",
            "top_entropy_quantile",
            "sapo_temperature_pos",
        )
    }
    again = AsymGRPOConfig(**settings(tmp_path, algorithm=algorithm, **implied))
    assert again.objective() == config.objective()
    # TRL's use_bias_correction_kl keeps its own default
    preset = ALGORITHMS[algorithm].config
    assert replace(config.objective(), kl=preset.kl) == preset


def test_token_mean_spans_the_accumulated_batch(saved_model: str, tmp_path: Path) -> None:
    """Two micro-batches of unlike lengths give the gradient of the one batch they make up."""
    inputs = off_policy_inputs(1, beta=0.0)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()

    def gradient(slices: int) -> torch.Tensor:
        trainer = build(
            "ours",
            tmp_path,
            "dapo",
            model=saved_model,
            gradient_accumulation_steps=slices,
            per_device_train_batch_size=8 // slices,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = slices
        size = 8 // slices
        for start in range(0, 8, size):
            part = {k: v[start : start + size] if v.dim() else v for k, v in inputs.items()}
            trainer._compute_loss(trainer.model, part).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    whole, parts = gradient(1), gradient(2)
    assert (whole - parts).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize(
    "correction",
    [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
)
def test_masks_and_weights_reach_the_loss(
    correction: str | None, saved_model: str, tmp_path: Path
) -> None:
    """As in stock TRL, on the same batch."""
    inputs = off_policy_inputs(2, beta=0.0)
    shape = inputs["completion_mask"].shape
    torch.manual_seed(0)
    inputs["tool_mask"] = torch.randint(0, 2, shape)
    sampled = inputs["old_per_token_logps"] + 0.3 * torch.randn(shape)
    ours: dict[str, Any] = {}
    if correction is not None:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        inputs["importance_sampling_ratio"] = trl_weights(
            (inputs["old_per_token_logps"] - sampled) * mask, correction
        )
        inputs["sampling_per_token_logps"] = sampled
        ours = {"correction": correction.replace("_", "-"), "correction_max": 1.3}
    losses = []
    for kind in ("trl", "ours"):
        trainer = build(
            kind, tmp_path, "grpo", model=saved_model, **(ours if kind == "ours" else {})
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.use_vllm = correction is not None  # TRL reads the weights only then
        losses.append(trainer._compute_loss(trainer.model, dict(inputs)).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def trl_weights(differences: torch.Tensor, mode: str) -> torch.Tensor:
    """What TRL documents of its modes, with an upper bound of 1.3."""
    level, how = mode.split("_")
    if level == "sequence":
        differences = differences.sum(1, keepdim=True)
    weights = differences.exp()
    if how == "truncate":
        return weights.clamp(max=1.3)
    return torch.where(weights > 1.3, 0.0, weights)


def test_leave_one_out_advantages_reach_the_batch(saved_model: str, tmp_path: Path) -> None:
    trainer = build("ours", tmp_path, "rloo", model=saved_model)
    seen: list[torch.Tensor] = []
    compute = trainer._compute_loss

    def spy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        seen.append(inputs["advantages"][inputs["rollout_index"].argsort()])
        return compute(model, inputs)

    trainer._compute_loss = spy
    trainer.args.max_steps = 1
    trainer.train()
    rewards = trainer._rewards_per_function[:, 0].double().view(-1, 4)
    expected = [[row[i] - (row.sum() - row[i]) / 3 for i in range(4)] for row in rewards]
    flat = torch.tensor(expected).flatten()
    torch.testing.assert_close(seen[0].double(), flat.double(), atol=1e-6, rtol=0)


def test_sampled_rollouts_carry_their_traces(saved_model: str, tmp_path: Path) -> None:
    """Rows of whole groups; the saved weight is the true gradient's factor."""
    kept: dict[int, list[dict[str, Any]]] = {}
    trainer = AsymGRPOTrainer(
        model=make_model(),
        args=AsymGRPOConfig(
            **settings(tmp_path, algorithm="sa-ah-grpo", steps_per_generation=2, max_steps=4)
        ),
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
        rollout_sink=kept.__setitem__,
        sampled_groups=3,
    )
    trainer.train()
    assert sorted(kept) == [2, 4]
    for step, rows in kept.items():
        assert [row["rollout"] for row in rows] == list(range(12))
        assert [row["group"] for row in rows] == [i // 4 for i in range(12)]
        for row in rows:
            length = len(row["token_ids"])
            assert row["step"] == step
            assert {
                len(row[k])
                for k in (
                    "tokens",
                    "logps",
                    "entropies",
                    "discount",
                    "ratio",
                    "weight",
                    "grpo_weight",
                    "quadrant",
                )
            } == {length}
            assert row["reward"] == pytest.approx(reward_digits([row["completion"]])[0])
            for token in range(length):
                inside = not row["clipped"][token]
                expected = row["discount"][token] * row["ratio"][token] * row["advantage"] * inside
                assert row["weight"][token] == pytest.approx(expected, rel=1e-5, abs=1e-7)
                if row["advantage"] >= 0:
                    assert row["discount"][token] == 1
                    assert row["weight"][token] == row["grpo_weight"][token]


@pytest.mark.parametrize("aggregate", ["sequence-mean", "token-mean"])
def test_evaluation_by_trl(aggregate: str, saved_model: str, tmp_path: Path) -> None:
    """TRL's own evaluation loop, with a group size of its own, logs our metrics under eval_."""
    trainer = AsymGRPOTrainer(
        model=saved_model,
        args=AsymGRPOConfig(
            **settings(tmp_path, algorithm="sa-ah-abc-grpo", aggregate=aggregate),
            eval_strategy="steps",
            eval_steps=2,
            num_generations_eval=2,
            per_device_eval_batch_size=4,
        ),
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    row = next(row for row in trainer.state.log_history if "eval_reward" in row)
    assert {"eval_loss", "eval_entropy/mean", "eval_clip/q1", "eval_reward/mean"} <= row.keys()
    assert row["eval_reward/mean"] == row["eval_reward"]
    trained = [row for row in trainer.state.log_history if "time/update" in row]
    assert all(row["time/update"] > 0 for row in trained)  # evaluation's seconds are not in it
