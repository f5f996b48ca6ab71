"""Sampling engines behind one protocol, and the records that they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .records import Engine, Rollout, Sampling

if TYPE_CHECKING:
    from .choice import choose_engine
    from .generate import TransformersEngine
    from .native import NativeEngine

__all__ = ["Engine", "NativeEngine", "Rollout", "Sampling", "TransformersEngine", "choose_engine"]


def __getattr__(name: str) -> Any:
    """The engines, imported when asked for: the records alone need no torch."""
    if name == "choose_engine":
        from .choice import choose_engine

        return choose_engine
    if name == "TransformersEngine":
        from .generate import TransformersEngine

        return TransformersEngine
    if name == "NativeEngine":
        from .native import NativeEngine

        return NativeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
