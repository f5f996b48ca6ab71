"""Which engine runs a model, and why it is not the one that was asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import UserError
from . import inspection
from .generate import TransformersEngine
from .native import NativeEngine
from .records import Engine

ENGINES = ("native", "transformers", "vllm")
"""`vllm` is TRL's integration, which the trainer passes through; it is no class here."""


def choose_engine(name: str, model: nn.Module, tokenizer: Any) -> tuple[Engine, str | None]:
    """The engine of that name, or the one that can run the model and a line that says why.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> config = Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0)
    >>> engine, reason = choose_engine("native", Qwen2ForCausalLM(config), None)
    >>> engine.name, reason
    ('native', None)
    """
    if name not in ENGINES:
        raise UserError(f"no engine named {name!r}; choose from {', '.join(ENGINES)}")
    if name == "native":
        reason = inspection.unsupported(model) or disagreement(model, tokenizer)
        if reason is None:
            return NativeEngine(model, tokenizer), None
        return TransformersEngine(model, tokenizer), f"engine transformers, not native: {reason}"
    if name == "vllm":
        return TransformersEngine(model, tokenizer), (
            "engine transformers, not vllm: vLLM runs inside the trainer alone"
        )
    return TransformersEngine(model, tokenizer), None


def disagreement(model: nn.Module, tokenizer: Any) -> str | None:
    """How the native engine's logits differ from the model's own, if they do."""
    kind = getattr(inspection.text_config(model), "model_type", type(model).__name__)
    vocab = int(inspection.text_config(model).vocab_size)
    prompt = [(7 * index + 3) % vocab for index in range(6)]
    engine = NativeEngine(model, tokenizer, stop_token_ids=())
    try:
        native = engine.logits(prompt, split=4)
    except Exception as error:  # whatever a foreign architecture raises is the reason
        return f"{kind} does not run on the engine's cache ({type(error).__name__}: {error})"
    with inspection.decoding(model, None):
        ids = torch.tensor([prompt], device=native.device)
        own = model(input_ids=ids, use_cache=False).logits[0, 3:].float()
    coarse = next(model.parameters()).dtype != torch.float32
    if inspection.beyond_rounding(native, own, coarse) is not None:
        return f"{kind} gives other logits on the engine's cache than on its own"
    return None
