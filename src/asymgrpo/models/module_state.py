"""What the engine needs to know of a model, and the state that it puts it in for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model itself, below adapters and composite models."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: nn.Module) -> int | None:
    """Positions that the model was made for, or None where it states none."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return int(length) if length else None


def stop_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The end tokens of the tokenizer and of the model's generation config, in order."""
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


def unsupported(model: nn.Module) -> str | None:
    """Why the native engine cannot run this model, as far as its configuration tells."""
    config = text_config(model)
    kind = getattr(config, "model_type", type(model).__name__)
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder"
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return f"the adapter ({adapter.peft_type}) adds virtual tokens to the prompt"
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_supports_attention_backend", False):
        return f"{kind} does not use transformers' attention interface"
    kinds = set(getattr(config, "layer_types", None) or []) - KNOWN_LAYERS
    if kinds:
        return f"{kind} has layers of another kind: {', '.join(sorted(kinds))}"
    if getattr(config, "use_bidirectional_attention", False):
        return f"{kind} attends in both directions"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{kind} shares keys and values between layers"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the parameters lie on {len(devices)} devices"
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return "the parameters are sharded"
    return None


def beyond_rounding(found: Tensor, own: Tensor, coarse: bool) -> float | None:
    """By what share of the largest logit `found` differs from `own`, where no rounding explains it.

    `coarse` says that they come from half precision.

    >>> own = torch.tensor([1.0, -4.0])
    >>> beyond_rounding(own + 0.2, own, coarse=True) is None
    True
    >>> beyond_rounding(own + 2.0, own, coarse=True)
    0.5
    """
    share = ((found - own).abs().max() / own.abs().max().clamp(min=1e-6)).item()
    return None if share <= (0.1 if coarse else 1e-3) else share


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, once each; many times as fast as `model.modules()`.

    >>> len(submodules(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))))
    3
    """
    modules: list[nn.Module | None] = [model]
    opened = set()
    for module in modules:
        children = None if module is None else module.__dict__["_modules"]
        # Most have none of their own, and need not be remembered while the others are opened.
        if children and id(module) not in opened:
            opened.add(id(module))
            modules += children.values()
    return list({id(module): module for module in modules if module is not None}.values())


def has_hook(model: nn.Module) -> bool:
    """Whether the model or any module in it has a hook on its forward.

    >>> has_hook(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    False
    """
    # There are thousands of modules, most of them without any of their own. A module that is in
    # two places is seen twice, which costs less than to remember which ones were seen.
    modules: list[nn.Module | None] = [model]
    for module in modules:
        if module is None:
            continue
        state = module.__dict__
        if state["_forward_hooks"] or state["_forward_pre_hooks"]:
            return True
        if children := state["_modules"]:
            modules += children.values()
    return False


@contextmanager
def decoding(model: nn.Module, attention: str | None) -> Iterator[None]:
    """The model without dropout, checkpointing and gradients, on that attention (None: its own).

    Whatever ends the block, the model is then as it was, module by module: an adapter's dropout
    may be off while the model trains. Hooks that make embeddings require gradients, which
    checkpointing asks for, are off too.
    """
    # By the modules' own dictionaries: setting an attribute of a module the ordinary way costs a
    # noticeable part of a rollout when there are thousands of them.
    states = [vars(module) for module in submodules(model)]
    training = [state for state in states if state["training"]]
    configs: dict[int, Any] = {
        id(state["config"]): state["config"]
        for state in states
        if hasattr(state.get("config"), "_attn_implementation_internal")
    }
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    hooks = [
        (state["_forward_hooks"], key, hook)
        for state in states
        for key, hook in state["_forward_hooks"].items()
        if "require_grads" in getattr(hook, "__name__", "")
    ]
    try:
        for state in training:
            state["training"] = False
        if attention is not None:
            for config in configs.values():
                config._attn_implementation_internal = attention
        for owner, key, _ in hooks:
            del owner[key]
        with torch.no_grad():
            yield
    finally:
        for owner, key, hook in hooks:
            owner[key] = hook
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for state in training:
            state["training"] = True
