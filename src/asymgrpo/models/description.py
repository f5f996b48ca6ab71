"""What the engine and the scorer need to know about a model, in one place.

Unwrapping, the text configuration, token ids, and whether a model can be decoded or scored in our
own way, or why not. `self_test` compares the result with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

Use = Literal["decode", "score"]
"""By the native engine, or by the packed scorer."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""The attention layers that both can run."""


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model inside parallel wrappers, compilation and adapters.

    >>> causal_model(nn.parallel.DataParallel(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    *_, inner = _unwrapped(model)
    return inner


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what is inside each of its wrappers, from the outermost on."""
    inner: Any = model
    while True:
        yield inner
        if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif type(inner).__name__ == "DeepSpeedEngine":
            inner = inner.module
        else:
            return


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, below wrappers and of composite models."""
    config: Any = causal_model(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: nn.Module) -> int | None:
    """The largest number of positions that the model supports, or None if it does not say."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return int(length) if length else None


def stop_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens of the tokenizer, then of the model's generation config."""
    sources = (tokenizer, getattr(model, "generation_config", None))
    found: dict[int, None] = {}
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, (list, tuple)) else [value]
        found.update({int(token): None for token in values if token is not None})
    return tuple(found)


def first_token(model: nn.Module, tokenizer: Any) -> int | None:
    """The token that an empty prompt starts from."""
    for source in (tokenizer, text_config(model)):
        token = getattr(source, "bos_token_id", None)
        if isinstance(token, int):
            return token
    return None


def logit_scale(config: Any) -> float:
    """The factor that a model applies to its logits before soft-cap and softmax.

    Cohere, Falcon-H1 and others multiply; Granite and MiniCPM3 divide; HyperCLOVA X multiplies by
    the field that the latter divide by.
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


def unsupported(model: nn.Module, use: Use) -> str | None:
    """Why a model cannot be used in this way, as far as its configuration tells; None if it can.

    >>> unsupported(nn.Linear(1, 1), "score")
    'it is not a transformers causal language model'
    """
    causal: Any = causal_model(model)
    if getattr(causal, "config", None) is None or not hasattr(causal, "get_output_embeddings"):
        return "it is not a transformers causal language model"
    config = text_config(model)
    kind = getattr(config, "model_type", type(causal).__name__)
    if getattr(causal.config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder"
    adapters = [a for m in _unwrapped(model) for a in getattr(m, "peft_config", {}).values()]
    for adapter in adapters:
        if adapter.is_prompt_learning:
            return f"the adapter ({adapter.peft_type}) adds virtual tokens to the prompt"
    if not getattr(causal, "_supports_attention_backend", False):
        return f"{kind} does not use transformers' attention interface"
    other = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if other:
        return f"{kind} has layers of another kind: {', '.join(sorted(other))}"
    if getattr(config, "use_bidirectional_attention", False):
        return f"{kind} attends in both directions"
    # Sharded, every process would have to run its layers equally often, whatever its rollouts.
    if any(type(parameter).__name__ == "DTensor" for parameter in causal.parameters()):
        return "the parameters are sharded"
    return _not_decoded(causal, config, kind) if use == "decode" else _not_scored(causal, kind)


def _not_decoded(causal: nn.Module, config: Any, kind: str) -> str | None:
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{kind} shares keys and values between layers"
    devices = {parameter.device for parameter in causal.parameters()}
    return f"the parameters are on {len(devices)} devices" if len(devices) > 1 else None


def _not_scored(causal: Any, kind: str) -> str | None:
    if causal.config.get_text_config() is not causal.config:
        return f"{kind} takes more than text"
    if getattr(causal.config, "attention_dropout", 0.0):
        return f"{kind} drops attention weights (attention_dropout > 0)"
    head = causal.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return f"the output embedding of {kind} is not a plain matrix"
    if hasattr(head, "base_layer"):
        return "the adapter covers the output embedding"
    return None
