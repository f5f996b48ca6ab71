"""Selects the engine that runs a model, and says why if it is not the requested one."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError
from ..models.description import text_config, unsupported
from ..models.self_test import PREFIX, compute_types, disagreement, own_logits, probe_tokens
from .native.native_engine import DECODERS, NativeEngine
from .records import Engine
from .transformers_engine import TransformersEngine

__all__ = ["DECODERS", "ENGINES", "choose_engine"]

ENGINES = ("native", "transformers", "vllm")
"""`vllm` is TRL's integration, which the trainer uses directly; it is not a class here."""


def choose_engine(
    name: str, model: nn.Module, tokenizer: Any, decoder: str = "fused"
) -> tuple[Engine, str | None]:
    """The engine of that name, or the one that can run the model and a line that says why.

    `decoder` is the native engine's: one of DECODERS.

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
        reason = unsupported(model, "decode") or _self_test(model, tokenizer)
        if reason is None:
            return NativeEngine(model, tokenizer, decoder=decoder), None
        return TransformersEngine(model, tokenizer), f"engine transformers, not native: {reason}"
    if name == "vllm":
        return TransformersEngine(model, tokenizer), (
            "engine transformers, not vllm: vLLM runs inside the trainer alone"
        )
    return TransformersEngine(model, tokenizer), None


def _self_test(model: nn.Module, tokenizer: Any) -> str | None:
    """How the native engine's logits differ from the model's own, if they do."""
    kind = getattr(text_config(model), "model_type", type(model).__name__)
    tokens = probe_tokens(model)[:1]
    engine = NativeEngine(model, tokenizer, stop_token_ids=())
    try:
        found = engine.logits(tokens[0].tolist(), split=PREFIX)
    except Exception as error:  # whatever an unknown architecture raises is the reason
        return f"{kind} does not run on the engine's cache ({type(error).__name__}: {error})"
    own = own_logits(model, tokens)[0, PREFIX - 1 :]
    if disagreement(found - own, own.log_softmax(-1), *compute_types(model)) is not None:
        return f"{kind} gives other logits on the engine's cache than on its own"
    return None
