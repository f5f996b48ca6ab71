"""Rollouts: the native engine beside TRL's own paths, on the same model and prompts.

    python benchmarks/rollout.py [--shape 1.5b|demo] [--rounds 5] [--trl-rounds 1] [--no-lengths]

The shapes are those of `update.py`: for `1.5b` 16 prompts of about 100 tokens with 8 rollouts of
256 tokens, LoRA r=16, bfloat16, random weights; `demo` is that of the built-in model, for a CPU.
TRL's side is `GRPOTrainer._generate_single_turn` of a trainer as a user makes it: by `generate`,
and by vLLM in the same process where vllm is importable, its synchronisation counted. The second
setting gives each rollout a length of its own, from 32 to 1,024 tokens; `generate` has no such
thing and runs all rows to the longest, as it does when one row does not stop.

The floor is the weights and each row's keys and values read once a token at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from update import SHAPES, Shape

from asymgrpo.models import load_policy
from asymgrpo.rollout import NativeEngine, Sampling

BANDWIDTH = 4.3e12  # bytes a second of a large copy on an H200


@dataclass(frozen=True)
class Setting:
    """What every engine is asked for."""

    name: str
    prompts: list[list[int]]
    limits: list[int]


@dataclass(frozen=True)
class Outcome:
    """What an engine needed for it."""

    first: float
    seconds: float
    tokens: int
    peak: float


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def settings(shape: Shape, lengths: bool) -> list[Setting]:
    generator = random.Random(0)
    words = shape.config["vocab_size"]
    prompts = []
    for _ in range(shape.prompts):
        count = generator.randint(*shape.prompt_tokens)
        prompts += [[generator.randrange(3, words) for _ in range(count)]] * shape.group
    most = shape.completion_tokens[1]
    found = [Setting(f"{most} tokens each", prompts, [most] * len(prompts))]
    if lengths:
        low, high = (32, 1_024) if most == 256 else (4, 128)
        drawn = [generator.randint(low, high) for _ in prompts]
        found.append(Setting(f"{low} to {high} tokens", prompts, drawn))
    return found


def build_trainer(shape: Shape, device: str, folder: str, **options: Any) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.Qwen2Config(**shape.config, eos_token_id=1, pad_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    rollouts = shape.prompts * shape.group
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rollouts,
            num_generations=shape.group,
            max_completion_length=shape.completion_tokens[1],
            bf16=shape.dtype == torch.bfloat16,
            report_to="none",
            **options,
        ),
        train_dataset=any_dataset(),
        processing_class=load_policy("tiny").tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return trainer


def any_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"prompt": ["1+1="] * 64})


def measure(run: Callable[[int], list[int]], rounds: int) -> Outcome:
    """Seconds of the first call and the median of the others; `run` returns tokens by rollout."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(rounds + 1):
        start = now()
        counts = run(number)
        seconds.append(now() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return Outcome(seconds[0], median(seconds[1:] or seconds), sum(counts), peak)


def native(trainer: Any, setting: Setting) -> Callable[[int], list[int]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    engine = NativeEngine(model, trainer.processing_class)
    count = len(setting.prompts)

    def run(number: int) -> list[int]:
        rollouts = engine.generate(
            setting.prompts,
            Sampling(max_new_tokens=max(setting.limits)),
            range(number * count, (number + 1) * count),
            limits=setting.limits,
        )
        return [len(rollout.token_ids) for rollout in rollouts]

    return run


def by_generate(trainer: Any, setting: Setting) -> Callable[[int], list[int]]:
    trainer.generation_config.max_new_tokens = max(setting.limits)

    def run(number: int) -> list[int]:
        ids, _ = trainer._generate_single_turn(setting.prompts, None, {}, trainer.num_generations)
        return [min(len(one), limit) for one, limit in zip(ids, setting.limits, strict=True)]

    return run


def by_vllm(trainer: Any, setting: Setting) -> Callable[[int], list[int]]:
    from vllm import SamplingParams

    generation = trainer.vllm_generation

    def run(number: int) -> list[int]:
        generation.sync_weights()
        if len(set(setting.limits)) == 1:
            _, ids, _, _ = generation.generate(
                prompts=setting.prompts, images=None, num_generations=trainer.num_generations
            )
            return [len(one) for one in ids]
        wanted = [SamplingParams(max_tokens=limit, temperature=1.0) for limit in setting.limits]
        prompts = [{"prompt_token_ids": prompt} for prompt in setting.prompts]
        outputs = generation.llm.generate(prompts, sampling_params=wanted, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


def floor(shape: Shape, setting: Setting, model: Any) -> float:
    """Seconds that reading weights, keys and values takes, with rows leaving as they end."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    token *= shape.dtype.itemsize
    lengths = [len(prompt) for prompt in setting.prompts]
    read = sum(
        limit * length + limit * (limit + 1) // 2
        for limit, length in zip(setting.limits, lengths, strict=True)
    )
    return float(max(setting.limits) * weights + read * token) / BANDWIDTH


def report(setting: Setting, outcomes: dict[str, Outcome], least: float) -> None:
    print(f"\n{setting.name}, {len(setting.prompts)} rollouts, floor {least:.3f} s")
    for name, one in outcomes.items():
        print(
            f"  {name:16}{one.seconds:9.3f} s {one.tokens / one.seconds:11,.0f} tokens a second"
            f"  {least / one.seconds:6.1%} of the floor's speed  peak {one.peak:5.1f} GiB"
            f"  first call {one.first - one.seconds:+.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="1.5b" if torch.cuda.is_available() else "demo"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trl-rounds", type=int, default=1)
    parser.add_argument("--lengths", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[options.shape]
    asked = settings(shape, options.lengths)
    outcomes: dict[str, dict[str, Outcome]] = {setting.name: {} for setting in asked}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(shape, device, folder)
        least = {setting.name: floor(shape, setting, trainer.model) for setting in asked}
        for setting in asked:
            found = outcomes[setting.name]
            found["native"] = measure(native(trainer, setting), options.rounds)
            report(setting, found, least[setting.name])
            # A thousand steps of `generate` take over a minute, and it is warm by then.
            rounds = options.trl_rounds if setting is asked[0] else 0
            found["TRL, generate"] = measure(by_generate(trainer, setting), rounds)
            report(setting, found, least[setting.name])
        del trainer
        gc.collect()
        if importlib.util.find_spec("vllm") is not None:
            other = build_trainer(shape, device, folder, use_vllm=True, vllm_mode="colocate")
            for setting in asked:
                run = by_vllm(other, setting)
                outcomes[setting.name]["TRL, vLLM"] = measure(run, options.rounds)
        else:
            print("vllm is not importable here, so TRL with vLLM takes no part")
    for setting in asked:
        report(setting, outcomes[setting.name], least[setting.name])
    for setting in asked:
        ours, *others = outcomes[setting.name].items()
        for name, one in others:
            ratio = one.seconds / ours[1].seconds
            print(f"{setting.name}: native is {ratio:.1f} times as fast as {name}")


if __name__ == "__main__":
    main()
