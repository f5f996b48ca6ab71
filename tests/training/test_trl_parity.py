"""Our trainer against the stock one, on the same model and the same batch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from asymgrpo.training.trl import FORWARD_INPUTS, AsymGRPOConfig, AsymGRPOTrainer
from small import make_model, make_tokenizer

TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "dual-clip-grpo": {"loss_type": "grpo", "delta": 4.0},
}
PROMPTS = ["1+1=", "12+30=", "7*8=", "9-4=", "a?", "bc=", "5/5=", "3+4+5="]


def reward_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return base | changes


def build(kind: str, folder: Path, algorithm: str, model: Any = None, **changes: Any) -> Any:
    model = make_model() if model is None else model
    common = {
        "model": model,
        "reward_funcs": changes.pop("reward_funcs", reward_digits),
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": make_tokenizer(),
        "peft_config": changes.pop("peft_config", None),
        "callbacks": changes.pop("callbacks", None),
    }
    if algorithm == "none":  # TRL's options alone
        algorithm, named = "grpo", {}
    else:
        named = TRL_SETTINGS.get(algorithm, {})
    if kind == "trl":
        args = GRPOConfig(**settings(folder, **named, **changes))
        return GRPOTrainer(args=args, **common)
    changes = {"engine": "transformers", "scorer": "padded"} | changes  # stock TRL's own paths
    args = AsymGRPOConfig(**settings(folder, algorithm=algorithm, **changes))
    return AsymGRPOTrainer(args=args, **common)


def off_policy_inputs(seed: int, beta: float) -> dict[str, Any]:
    """A ragged batch whose old log-probs lie off the policy's, past every bound."""
    generator = torch.Generator().manual_seed(seed)
    rows, prompt, width = 8, 6, 9
    vocabulary = len(make_tokenizer())

    def ids(columns: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (rows, columns), generator=generator)

    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    left = torch.randint(0, prompt - 1, (rows,), generator=generator)
    inputs = {
        "prompt_ids": ids(prompt),
        "prompt_mask": (torch.arange(prompt) >= left[:, None]).long(),
        "completion_ids": ids(width),
        "completion_mask": (torch.arange(width) < lengths[:, None]).long(),
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": lengths.sum() * 2,
        "rollout_index": torch.arange(rows),
    }
    with torch.no_grad():
        model = make_model()
        whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logits = model(input_ids=whole, attention_mask=mask).logits[:, prompt - 1 : -1]
        logps = logits.log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
    noise = torch.randn(rows, width, generator=generator)
    inputs["old_per_token_logps"] = logps + noise
    if beta:
        inputs["ref_per_token_logps"] = logps + noise.flip(0) * 0.3
    return inputs


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder, so that TRL can load the reference model anew."""
    folder = str(tmp_path_factory.mktemp("model"))
    make_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("algorithm", TRL_SETTINGS)
def test_loss_and_gradient_are_trls(
    algorithm: str, beta: float, accumulation: int, saved_model: str, tmp_path: Path
) -> None:
    inputs = off_policy_inputs(0, beta)
    results = {}
    for kind in ("trl", "ours"):
        trainer = build(
            kind,
            tmp_path,
            algorithm,
            beta=beta,
            gradient_accumulation_steps=accumulation,
            model=saved_model,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = accumulation
        loss = trainer._compute_loss(trainer.model, dict(inputs))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        results[kind] = loss.item(), gradients, dict(trainer._metrics["train"])
    (theirs, their_gradients, their_metrics), (ours, our_gradients, our_metrics) = (
        results["trl"],
        results["ours"],
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    for name, gradient in their_gradients.items():
        error = (our_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name
    # A cap where A < 0 is an upper clip to us, and nothing to TRL.
    unlike = {"clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean"}
    unlike = unlike if algorithm == "dual-clip-grpo" else set()
    for name in (their_metrics.keys() & our_metrics.keys()) - unlike:
        assert our_metrics[name] == pytest.approx(their_metrics[name], rel=1e-5, abs=1e-8), name
    if algorithm in ("grpo", "dapo", "dr-grpo"):
        assert {k for k in their_metrics if k.startswith("clip_ratio")} <= our_metrics.keys()


def test_override_points_are_as_pinned() -> None:
    """A change of TRL's that would break us fails here, by name."""
    expected = {
        "_compute_loss": ["self", "model", "inputs"],
        "_generate_single_turn": [
            "self",
            "prompt_ids",
            "images",
            "multimodal_fields",
            "num_generations",
            "has_tool_images",
        ],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "get_off_policy_mask": [
            "advantages",
            "per_token_logps",
            "sampling_per_token_logps",
            "mask",
            "off_policy_threshold",
        ],
        "log": ["self", "logs", "start_time"],
    }
    for name, parameters in expected.items():
        assert hasattr(GRPOTrainer, name), f"TRL no longer has GRPOTrainer.{name}"
        found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        assert found == parameters, f"TRL changed the parameters of GRPOTrainer.{name}"
    forward = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert list(forward)[:8] == [
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ], "TRL changed the parameters of GRPOTrainer._get_per_token_logps_and_entropies"
    assert "pixel_values" in FORWARD_INPUTS
    loss_source = inspect.getsource(GRPOTrainer._compute_loss)
    for key in (
        "old_per_token_logps",
        "ref_per_token_logps",
        "tool_mask",
        "num_items_in_batch",
        "importance_sampling_ratio",
        "sampling_per_token_logps",
        "advantages",
    ):
        assert f'"{key}"' in loss_source, f"TRL's _compute_loss no longer reads inputs[{key!r}]"
    for attribute in ("_entropy_window_stats", "_last_world_entropy", "entropy_coef"):
        assert f"self.{attribute}" in loss_source, f"TRL's entropy control lost {attribute}"


def test_twenty_steps_follow_trl(tmp_path: Path) -> None:
    """Same seed: the same completions, rewards and losses, step by step."""
    histories = {}
    for kind in ("trl", "ours"):
        seen: list[list[str]] = []

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            seen.append(list(completions))  # noqa: B023
            return reward_digits(completions)

        trainer = build(
            kind,
            tmp_path / kind,
            "grpo",
            max_steps=20,
            steps_per_generation=2,
            gradient_accumulation_steps=1,
            reward_funcs=reward,
        )
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        histories[kind] = seen, rows
    (their_texts, theirs), (our_texts, ours) = histories["trl"], histories["ours"]
    assert len(theirs) == len(ours) == 20
    assert our_texts == their_texts
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-7)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for name in ("reward", "reward_std", "entropy", "completions/mean_length"):
            if name in other:
                assert row[name] == pytest.approx(other[name], rel=1e-5), name
