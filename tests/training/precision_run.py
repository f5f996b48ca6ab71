"""Short training runs in chosen types, as a user of the trainer starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from asymgrpo.models import lora_config
from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer
from small import make_model, make_tokenizer

PROMPTS = ["1+1=", "12+30=", "7*8=", "9-4=", "a?", "bc=", "5/5=", "3+4+5="]


def reward_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def build(
    folder: Path,
    *,
    weights: str = "float32",
    lora: bool = False,
    device: str = "cpu",
    callbacks: Any = None,
    **changes: Any,
) -> AsymGRPOTrainer:
    settings: dict[str, Any] = {
        "algorithm": "abc-grpo",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": device == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    # Wide enough that the fused kernels of a GPU take it.
    model = make_model(hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    return AsymGRPOTrainer(
        model=model.to(getattr(torch, weights)),
        args=AsymGRPOConfig(output_dir=str(folder), **settings | changes),
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
        peft_config=lora_config(4) if lora else None,
        callbacks=callbacks,
    )


def logged(trainer: AsymGRPOTrainer) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]
