"""Sampling engines behind one protocol, and the records that they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .records import Engine, Rollout, Sampling

if TYPE_CHECKING:
    from .native import NativeEngine
    from .select_engine import choose_engine
    from .transformers_engine import TransformersEngine

__all__ = ["Engine", "NativeEngine", "Rollout", "Sampling", "TransformersEngine", "choose_engine"]


def __getattr__(name: str) -> Any:
    """Imports engines on first use: the records alone do not need torch."""
    if name == "choose_engine":
        from .select_engine import choose_engine

        return choose_engine
    if name == "TransformersEngine":
        from .transformers_engine import TransformersEngine

        return TransformersEngine
    if name == "NativeEngine":
        from .native import NativeEngine

        return NativeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
