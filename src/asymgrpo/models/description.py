"""Which models the packed scorer can take, and what it must know about them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model inside parallel wrappers, compilation and adapters.

    >>> causal_model(nn.parallel.DataParallel(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    inner: Any = model
    while True:
        if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif type(inner).__name__ == "DeepSpeedEngine":
            inner = inner.module
        else:
            assert isinstance(inner, nn.Module)
            return inner


def logit_scale(config: Any) -> float:
    """What a model multiplies its logits by before soft-cap and softmax.

    Cohere, Falcon-H1 and others multiply; Granite and MiniCPM3 divide, HyperCLOVA X multiplies
    by the field of the same name.
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


def unsupported(model: nn.Module) -> str | None:
    """Why a model cannot be packed, as far as its configuration tells; None where it can."""
    causal: Any = causal_model(model)
    config = getattr(causal, "config", None)
    if config is None or not hasattr(causal, "get_output_embeddings"):
        return "it is not a transformers causal language model"
    if any(isinstance(p, DTensor) for p in causal.parameters()):
        # Every process would have to run its layers equally often, whatever its rollouts.
        return "its parameters are sharded over processes"
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if config.get_text_config() is not config:
        return "it takes more than text"
    if not getattr(causal, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is bidirectional"
    if getattr(config, "attention_dropout", 0.0):
        return "it drops attention weights (attention_dropout > 0)"
    return _unsupported_head(model, causal)


def _unsupported_head(model: Any, causal: Any) -> str | None:
    head = causal.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return "its output embedding is not a plain matrix"
    if hasattr(head, "base_layer"):
        return "the adapter covers its output embedding"
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            return "the adapter prepends learned prompts"
    return None
