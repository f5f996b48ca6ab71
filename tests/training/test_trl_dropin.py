"""Scripts written for TRL run with our classes: parsers, checkpoints, evaluation, resuming."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, TrlParser

from asymgrpo.training.replaced_generate import replaced_generate
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer
from small import make_model, make_tokenizer
from test_trl_parity import PROMPTS, build, off_policy_inputs, reward_digits, saved_model, settings

__all__ = ["saved_model"]

QUIET = ["--output_dir", "out", "--report_to", "none", "--use_cpu", "--bf16", "False"]


def trainer_with_evaluation(folder: Path, model: Any = None, **changes: Any) -> AsymGRPOTrainer:
    sink = changes.pop("rollout_sink", None)
    defaults = {
        "max_completion_length": 4,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "num_generations_eval": 2,
    }
    return AsymGRPOTrainer(
        model=model or make_model(),
        args=AsymGRPOConfig(**settings(folder, **(defaults | changes))),
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
        processing_class=make_tokenizer(),
        rollout_sink=sink,
        sampled_groups=8,
    )


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# Parsers


def test_transformers_parser_takes_our_config() -> None:
    (plain,) = HfArgumentParser((AsymGRPOConfig,)).parse_args_into_dataclasses(QUIET)
    assert plain.objective() == AsymGRPOConfig(**settings(Path("out"))).objective()
    words = ["--algorithm", "sa-ah-grpo", "--alpha", "0.25", "--inclusive", "False"]
    words += ["--scale_rewards", "False", "--epsilon", "0.1", "--loss_type", "dapo"]
    (config,) = HfArgumentParser((AsymGRPOConfig,)).parse_args_into_dataclasses(QUIET + words)
    objective = config.objective()
    assert (objective.horizon.alpha, objective.horizon.inclusive) == (0.25, False)
    assert (objective.advantage.scale, objective.aggregate) == ("none", "token-mean")
    assert (objective.ratio.eps_low, objective.ratio.eps_high) == (0.1, 0.1)


def test_trls_parser_takes_our_config_and_its_file(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    recipe.write_text("algorithm: abc-grpo\neps3: 0.5\nscale_rewards: batch\n")
    parser = TrlParser((AsymGRPOConfig,))
    (config,) = parser.parse_args_and_config([*QUIET, "--config", str(recipe)])
    assert config.objective().ratio.eps3 == 0.5
    assert config.objective().advantage.scale == "batch"
    shown = io.StringIO()
    parser.print_help(shown)
    assert "--tau_negative" in shown.getvalue()


def test_every_field_of_ours_has_a_help_text() -> None:
    silent = [
        name
        for name, entry in AsymGRPOConfig.__dataclass_fields__.items()
        if name in AsymGRPOConfig.__annotations__ and not entry.metadata.get("help")
    ]
    assert silent == []


# Checkpoints


@pytest.mark.parametrize(
    "changes",
    [
        {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "best", "save_total_limit": 1},
        {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True},
    ],
    ids=["limit", "no-limit", "best", "load-best"],
)
def test_the_best_checkpoint_is_kept_and_named(changes: dict[str, Any], tmp_path: Path) -> None:
    best = {"metric_for_best_model": "reward", "greater_is_better": True}
    trainer = trainer_with_evaluation(tmp_path, **best, **changes, learning_rate=3e-2)
    trainer.train()
    rewards = {
        row["step"]: row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row
    }
    step = max(rewards, key=lambda step: (rewards[step], -step))
    named = Path(trainer.state.best_model_checkpoint or "")
    assert named == tmp_path / f"checkpoint-{step}"
    assert (named / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".*"))
    for path in tmp_path.glob("checkpoint-*/trainer_state.json"):
        assert ".saving" not in path.read_text()
    if changes.get("load_best_model_at_end"):
        from safetensors.torch import load_file

        kept = load_file(named / "model.safetensors")
        assert all(torch.equal(p, kept[n]) for n, p in trainer.model.named_parameters())


@pytest.mark.parametrize("kind", ["true", "path", "string"])
def test_every_way_to_name_a_checkpoint_resumes_alike(kind: str, tmp_path: Path) -> None:
    """Over an epoch's end, where the order of the prompts depends on what was resumed."""
    common = {"engine": "native", "scorer": "padded", "max_completion_length": 4}
    whole = build(
        "ours", tmp_path, "sa-ah-grpo", max_steps=6, save_strategy="steps", save_steps=5, **common
    )
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-6")  # so that the other one is the last
    checkpoint = tmp_path / "checkpoint-5"
    asked: Any = {"true": True, "path": checkpoint, "string": str(checkpoint)}[kind]
    again = build("ours", tmp_path, "sa-ah-grpo", max_steps=6, **common)
    again.train(asked)
    assert again.state.global_step == 6
    assert same_weights(weights_of(again), weights_of(whole))


def test_resuming_from_nothing_says_so(tmp_path: Path) -> None:
    trainer = build("ours", tmp_path, "grpo", max_steps=1)
    with pytest.raises(ValueError, match="holds no checkpoint to resume from"):
        trainer.train(resume_from_checkpoint=True)


def test_resuming_with_other_batches_samples_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build(
        "ours",
        tmp_path,
        "grpo",
        max_steps=3,
        steps_per_generation=4,
        save_strategy="steps",
        save_steps=3,
    )
    first.train()
    again = build("ours", tmp_path, "grpo", max_steps=6, steps_per_generation=2)
    again.train(str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    assert "has batches of another shape; its rollouts are sampled anew" in capsys.readouterr().out


def test_train_takes_its_arguments_by_place(tmp_path: Path) -> None:
    trainer = build("ours", tmp_path, "grpo", max_steps=1)
    trainer.train(None, None)
    assert trainer.state.global_step == 1


# Evaluation within a rollout batch


def test_evaluation_leaves_the_sampled_rewards_alone(tmp_path: Path) -> None:
    kept: dict[int, list[dict[str, Any]]] = {}
    trainer = trainer_with_evaluation(
        tmp_path, steps_per_generation=2, max_steps=4, rollout_sink=kept.__setitem__
    )
    trainer.train()
    rows = [row for step in (2, 4) for row in kept[step]]
    assert len(rows) == 32
    for row in rows:
        assert row["reward"] == pytest.approx(reward_digits([row["completion"]])[0])


def test_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    """The native engine's seeds depend on the step, not on what was evaluated before it.

    Up to rounding: evaluation draws from torch's generator, by which TRL shuffles a batch.
    """
    ends = []
    for strategy in ("steps", "no"):
        trainer = trainer_with_evaluation(tmp_path / strategy, eval_strategy=strategy, max_steps=3)
        trainer.train()
        ends.append(weights_of(trainer))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5)


# Compilation


def test_torch_compile_trains_with_the_packed_scorer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    for compiled in (True, False):
        trainer = build(
            "ours",
            tmp_path,
            "sa-ah-grpo",
            max_steps=2,
            scorer="packed",
            torch_compile=compiled,
            torch_compile_backend="eager" if compiled else None,
        )
        trainer.train()
        ends.append(weights_of(trainer))
    assert same_weights(*ends)
    assert capsys.readouterr().out.count("scored without torch_compile's graph") == 1


# Metrics


def metrics_of(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, dict(inputs))
    return dict(trainer._metrics["train"])


def test_tokens_without_advantage_are_not_counted_as_clipped(
    saved_model: str, tmp_path: Path
) -> None:
    inputs = off_policy_inputs(0, beta=0.0)
    inputs["advantages"] = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 0.5, -0.5])
    theirs, ours = (
        metrics_of(build(kind, tmp_path, "grpo", model=saved_model), inputs)
        for kind in ("trl", "ours")
    )
    names = [name for name in theirs if name.startswith("clip_ratio/")]
    assert len(names) == 5
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6)


def test_cispo_counts_its_cap_as_trl_does(saved_model: str, tmp_path: Path) -> None:
    inputs = off_policy_inputs(3, beta=0.0)
    values = [
        metrics_of(build(kind, tmp_path, "cispo", model=saved_model), inputs)["cispo_clip_ratio"]
        for kind in ("trl", "ours")
    ]
    assert values[1] == pytest.approx(values[0])
    assert values[0][0] > 0


def test_entropies_by_sign_weigh_every_token_alike(saved_model: str, tmp_path: Path) -> None:
    """Micro-batches of unlike lengths: the logged mean is that of the tokens, not of means."""
    trainer = build("ours", tmp_path, "grpo", model=saved_model)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    seen: list[tuple[float, torch.Tensor]] = []
    score = trainer._get_per_token_logps_and_entropies

    def spy(*args: Any, **kwargs: Any) -> Any:
        scores = score(*args, **kwargs)
        for row, keep in enumerate(inputs["completion_mask"].bool()):
            seen.append((inputs["advantages"][row].item(), scores[1][row][keep].detach().double()))
        return scores

    trainer._get_per_token_logps_and_entropies = spy
    for seed in (1, 2):
        inputs = off_policy_inputs(seed, beta=0.0)
        trainer._compute_loss(trainer.model, dict(inputs))
    logs: dict[str, float] = {}
    trainer.log(logs)
    for name, sign in (("positive", 1), ("negative", -1)):
        tokens = torch.cat([entropies for advantage, entropies in seen if advantage * sign > 0])
        assert logs[f"entropy/{name}"] == pytest.approx(tokens.mean().item(), rel=1e-6)


def test_entropies_by_sign_span_processes_and_accumulation(tmp_path: Path) -> None:
    out = tmp_path / "result"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *(str(Path(__file__).parent / "sign_metrics_run.py"), str(out)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
    rollouts = [row for rank in ranks for row in rank["seen"]]
    assert len(rollouts) == 2 * 2 * 2 * 4  # processes, steps, micro-batches, rollouts
    (line,) = [row for row in ranks[0]["logged"] if "loss" in row]
    for name, sign in (("positive", 1), ("negative", -1)):
        signed = [(total, count) for advantage, total, count in rollouts if advantage * sign > 0]
        wanted = sum(total for total, _ in signed) / sum(count for _, count in signed)
        assert line[f"entropy/{name}"] == pytest.approx(wanted, rel=1e-6)


def test_level_groups_are_counted_and_teach_nothing(tmp_path: Path) -> None:
    """Seven rewards of 0.7, and two functions whose totals are 0.7 but not in float32."""

    def first(completions: list[str], **_: Any) -> list[float]:
        return [0.1 if index % 2 else 0.7 for index in range(len(completions))]

    def second(completions: list[str], **_: Any) -> list[float]:
        return [0.6 if index % 2 else 0.0 for index in range(len(completions))]

    def level(completions: list[str], **_: Any) -> list[float]:
        return [0.7] * len(completions)

    shape = {"per_device_train_batch_size": 14, "num_generations": 7, "max_steps": 1}
    for rewards in (level, [first, second]):
        trainer = build("ours", tmp_path, "sa-ah-grpo", reward_funcs=rewards, **shape)
        before = weights_of(trainer)
        trainer.train()
        row = next(row for row in trainer.state.log_history if "loss" in row)
        assert row["reward/zero_variance_groups"] == 1.0
        assert not {"entropy/positive", "entropy/negative", "horizon/effective"} & row.keys()
        assert set(trainer._logs["advantages"]) == {0.0}
        assert same_weights(before, weights_of(trainer))


# Choices as in TRL


def test_a_trainer_without_args_has_its_defaults(
    saved_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare = GRPOConfig.__post_init__

    def prepare_on_cpu(self: Any) -> None:  # TRL's default asks for a GPU
        self.use_cpu = True
        prepare(self)

    monkeypatch.setattr(GRPOConfig, "__post_init__", prepare_on_cpu)
    common: dict[str, Any] = {
        "reward_funcs": reward_digits,
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "processing_class": make_tokenizer(),
    }
    trainer = AsymGRPOTrainer(saved_model, **common)
    assert isinstance(trainer.args, AsymGRPOConfig)
    assert trainer.args.output_dir == f"{Path(saved_model).name}-GRPO"
    assert AsymGRPOTrainer(make_model(), args=None, **common).args.algorithm == "grpo"


@pytest.mark.parametrize("loss_type", ["bnpo", "luspo", "dapo", "dr_grpo", "cispo", "sapo", "grpo"])
def test_loss_types_are_trls(loss_type: str, saved_model: str, tmp_path: Path) -> None:
    """The same word in both configurations: the same loss and gradient, at TRL's own defaults."""
    inputs = off_policy_inputs(4, beta=0.0)
    results = []
    for kind in ("trl", "ours"):
        options = {"loss_type": loss_type, "gradient_accumulation_steps": 2}
        if loss_type == "luspo":
            options["importance_sampling_level"] = "sequence"
        trainer = build(kind, tmp_path, "none", model=saved_model, **options)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        loss = trainer._compute_loss(trainer.model, dict(inputs))
        loss.backward()
        slope = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results.append((loss.item(), slope))
    (theirs, their_slope), (ours, our_slope) = results
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert (our_slope - their_slope).norm() / their_slope.norm() < 1e-5


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_entropies_have_a_gradient_only_for_the_bonus(coefficient: float, tmp_path: Path) -> None:
    trainer = build("ours", tmp_path, "grpo", scorer="packed", entropy_coef=coefficient)
    ids = torch.arange(3, 11).unsqueeze(0)
    _, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), 4, compute_entropy=True
    )
    assert entropies.requires_grad == (coefficient > 0)


def test_mocked_generate_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build("ours", tmp_path, "grpo", max_steps=2, engine="native")
    generate, calls = trainer.model.generate, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return generate(*args, **kwargs)

    trainer.model.generate = wrapped
    trainer.train()
    assert len(calls) == 2
    said = capsys.readouterr().out
    assert said.count("model.generate is not its class's own (mocked or wrapped)") == 1
    del trainer.model.generate
    assert replaced_generate(trainer.model) is None
