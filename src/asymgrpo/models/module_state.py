"""Walking a model's modules fast, and running it in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def submodules(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, once each; many times faster than `model.modules()`.

    >>> len(submodules(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))))
    3
    """
    modules: list[nn.Module | None] = [model]
    opened = set()
    for module in modules:
        children = None if module is None else module.__dict__["_modules"]
        # Most have no children, and need not be remembered.
        if children and id(module) not in opened:
            opened.add(id(module))
            modules += children.values()
    return list({id(module): module for module in modules if module is not None}.values())


def has_hook(model: nn.Module) -> bool:
    """Whether the model or any module in it has a forward hook.

    >>> has_hook(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    False
    """
    # There are thousands of modules, most without children. Visiting a shared module twice costs
    # less than remembering which were visited.
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
    """Runs the model without dropout, checkpointing and gradients, on an attention implementation.

    None leaves the attention as it is. At the end the state of every module is restored one by one,
    also after an exception: an adapter's dropout may be off while the model trains. Hooks that make
    embeddings require gradients, which checkpointing installs, are removed meanwhile.
    """
    # Through the modules' dictionaries: setting attributes the ordinary way takes a noticeable part
    # of a rollout when there are thousands of modules.
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
