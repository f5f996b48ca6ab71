"""A whole training step, rollouts included: our trainer beside TRL's, each as a user runs it.

    python benchmarks/step.py [--shape 1.5b|demo] [--steps 5] [--trl-steps 2]

The shapes are those of `update.py`: for `1.5b` 16 prompts of about 100 tokens, 8 rollouts of 256
tokens each, LoRA r=16, bfloat16, random weights. Every trainer gets the same prompts, reward and
settings; TRL's defaults stay as they are. vLLM takes part where it is importable. The first steps,
which compile, are left out of the medians; ratios come last.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import tempfile
import time
import zlib
from statistics import median
from typing import Any

import datasets
import torch
import transformers
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from update import SHAPES, Shape

from asymgrpo.models import load_policy
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer


class Clock(transformers.TrainerCallback):
    """Seconds of every optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self._start)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Something that differs within a group and costs nothing."""
    return [float(zlib.crc32(str(text).encode()) % 2) for text in completions]


def prompts(shape: Shape, tokenizer: Any) -> datasets.Dataset:
    generator = random.Random(0)
    low, high = shape.prompt_tokens
    texts = []
    while len(texts) < 8 * shape.prompts:
        text = "".join(generator.choice("0123456789+-*=") for _ in range(high + 10))
        ids = tokenizer(text).input_ids[: generator.randint(low, high)]
        texts.append(tokenizer.decode(ids))
    return datasets.Dataset.from_dict({"prompt": texts})


def build_model(shape: Shape, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.Qwen2Config(**shape.config, eos_token_id=1, pad_token_id=0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=shape.dtype)


def settings(shape: Shape, steps: int, folder: str) -> dict[str, Any]:
    rollouts = shape.prompts * shape.group
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": rollouts // shape.micro_batches,
        "gradient_accumulation_steps": shape.micro_batches,
        "num_generations": shape.group,
        "max_completion_length": shape.completion_tokens[1],
        "learning_rate": 1e-6,
        "bf16": shape.dtype == torch.bfloat16,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def run(kind: str, shape: Shape, device: str, steps: int, options: dict[str, Any]) -> list[float]:
    tokenizer = load_policy("tiny").tokenizer
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        common = settings(shape, steps, folder)
        ours = kind.startswith("asymgrpo")
        arguments = AsymGRPOConfig(**common, **options) if ours else GRPOConfig(**common, **options)
        trainer = (AsymGRPOTrainer if ours else GRPOTrainer)(
            model=build_model(shape, device),
            reward_funcs=reward,
            args=arguments,
            train_dataset=prompts(shape, tokenizer),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[clock],
        )
        trainer.train()
        history = [row for row in trainer.state.log_history if "time/rollout" in row]
    for row in history[-1:]:
        print(f"  rollout {row['time/rollout']:.2f} s, update {row['time/update']:.2f} s")
    del trainer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="1.5b" if torch.cuda.is_available() else "demo"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--trl-steps", type=int, default=2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[options.shape]
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "asymgrpo, grpo": (options.steps, {"algorithm": "grpo"}),
        "asymgrpo, sa-ah-grpo": (options.steps, {"algorithm": "sa-ah-grpo"}),
        "TRL, generate": (options.trl_steps, {}),
    }
    if device == "cpu":
        plain = {"algorithm": "grpo", "engine": "transformers", "scorer": "padded"}
        kinds["asymgrpo, transformers and padded"] = (options.trl_steps, plain)
    if importlib.util.find_spec("vllm") is not None:
        kinds["TRL, vLLM"] = (options.steps, {"use_vllm": True, "vllm_mode": "colocate"})
    else:
        print("vllm is not importable here, so TRL with vLLM takes no part")
    middle = {}
    for kind, (steps, chosen) in kinds.items():
        print(kind, flush=True)
        seconds = run(kind, shape, device, steps, chosen)
        kept = seconds[len(seconds) // 2 :]
        middle[kind] = median(kept)
        print(f"  seconds a step: {', '.join(f'{x:.2f}' for x in seconds)}", flush=True)
    for kind, value in middle.items():
        print(f"{kind:36}{value:9.3f} s a step")
    change = middle["asymgrpo, sa-ah-grpo"] / middle["asymgrpo, grpo"] - 1
    print(f"sa-ah-grpo costs {change:+.1%} over grpo")
    for kind in list(kinds)[2:]:
        print(f"asymgrpo is {middle[kind] / middle['asymgrpo, grpo']:.1f} times as fast as {kind}")


if __name__ == "__main__":
    main()
