"""What is trained in `rollout.py` and `step.py`: a model, its tokenizer, prompts and a reward.

`1.5b` has the shape of Qwen2.5-1.5B with random weights, bfloat16 and LoRA r=16 on every linear
layer, 16 prompts of about 100 tokens with 8 rollouts of 256 tokens. Its model lies in a folder,
since vLLM loads from one. `demo` is the demo itself: the built-in model, all of its parameters
trained, on the built-in task with the settings of the recipe `demo`.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from peft import LoraConfig
from update import SHAPES

from asymgrpo.experiment.data import load_reward
from asymgrpo.experiment.settings import load_recipe
from asymgrpo.models import load_policy
from asymgrpo.tasks import load_task
from asymgrpo.training.task_data import training_set


@dataclass(frozen=True)
class Subject:
    model: Callable[[], Any]
    """A fresh copy, each time with the same weights."""
    tokenizer: Any
    data: datasets.Dataset
    reward: Any
    peft_config: LoraConfig | None
    arguments: dict[str, Any]
    """What TRL's and our configuration are both given."""
    prompts: int
    """Different prompts a rollout batch."""


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def subject(name: str, folder: Path) -> Subject:
    """`1.5b` or `demo`; `folder` is for the weights."""
    return _demo() if name == "demo" else _random_weights(name, folder)


def _demo() -> Subject:
    recipe = load_recipe("demo")
    names = (
        "per_device_train_batch_size",
        "steps_per_generation",
        "num_generations",
        "max_completion_length",
        "learning_rate",
        "lr_scheduler_type",
    )
    arguments = {name: recipe[name] for name in names}
    task = load_task(recipe["task"])
    tokenizer = load_policy("tiny").tokenizer
    rollouts = arguments["per_device_train_batch_size"] * arguments["steps_per_generation"]
    return Subject(
        model=lambda: load_policy("tiny").model,
        tokenizer=tokenizer,
        data=training_set(task, range(4_096), tokenizer),
        reward=load_reward("task", task, None),
        peft_config=None,
        arguments=arguments | {"use_cpu": True, "bf16": False, "gradient_checkpointing": False},
        prompts=rollouts // arguments["num_generations"],
    )


def _random_weights(name: str, folder: Path) -> Subject:
    shape = SHAPES[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = _word_tokenizer(shape.config["vocab_size"])
    torch.manual_seed(0)
    with torch.device(device):
        config = transformers.Qwen2Config(**shape.config, eos_token_id=1, pad_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generator = random.Random(0)
    words = range(3, shape.config["vocab_size"])
    texts = [
        " ".join(
            f"w{i}" for i in generator.choices(words, k=generator.randint(*shape.prompt_tokens))
        )
        for _ in range(8 * shape.prompts)
    ]

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=shape.dtype).to(
            device
        )

    return Subject(
        model=load,
        tokenizer=tokenizer,
        data=datasets.Dataset.from_dict({"prompt": texts}),
        reward=_checksum,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        arguments={
            "per_device_train_batch_size": shape.prompts * shape.group // shape.micro_batches,
            "gradient_accumulation_steps": shape.micro_batches,
            "num_generations": shape.group,
            "max_completion_length": shape.completion_tokens[1],
            "learning_rate": 1e-6,
            "bf16": shape.dtype == torch.bfloat16,
        },
        prompts=shape.prompts,
    )


def _word_tokenizer(vocabulary: int) -> Any:
    """As many words as the model has, so that decoding costs what it costs."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(len(special), vocabulary))]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, special["unk_token"]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _checksum(completions: list[Any], **_: Any) -> list[float]:
    """Something that differs within a group and costs nothing."""
    return [float(zlib.crc32(str(text).encode()) % 2) for text in completions]
