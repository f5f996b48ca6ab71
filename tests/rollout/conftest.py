"""Tiny random models of every family that the native engine is to run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough that the next token depends visibly on what came before.
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "smollm3": ("smollm3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, "query_pre_attn_scalar": 8}),
}


def tiny_model(
    family: str = "qwen2", device: str = "cpu", dtype: Any = None, **changes: Any
) -> Any:
    kind, special = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SHAPE, **special, **changes})
    # Under sdpa, transformers 5.17 leaves Gemma 2's cap on the scores out.
    attention = "eager" if family == "gemma2" else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(device, dtype or torch.float32).eval()


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return wrapped


def ragged_prompts(count: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 64) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return tiny_model


@pytest.fixture
def lora() -> Callable[..., Any]:
    return with_lora


@pytest.fixture
def ragged() -> Callable[..., list[list[int]]]:
    return ragged_prompts
