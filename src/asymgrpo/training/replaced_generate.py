"""Whether `generate` of a model is transformers' own, which the native engine stands in for."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

from asymgrpo.models.description import causal_model

_OWN = GenerationMixin.generate


def replaced_generate(model: Any) -> str | None:
    """Why rollouts must go through `model.generate`: it was mocked, wrapped or written anew.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
    >>> replaced_generate(model)
    >>> model.generate = lambda **inputs: None
    >>> replaced_generate(model)
    "model.generate is not its class's own (mocked or wrapped), and the native engine ..."
    """
    inner = causal_model(model)
    where = None
    if any("generate" in vars(each) for each in (model, inner)):
        where = "is not its class's own (mocked or wrapped)"
    elif getattr(type(inner), "generate", _OWN) is not _OWN:
        where = f"of {type(inner).__name__} is not transformers' own"
    if where is None:
        return None
    return f"model.generate {where}, and the native engine would not call it"
