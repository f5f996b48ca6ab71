"""The native engine: rollouts in process, on the parameters that are being trained."""

from .native_engine import NativeEngine

__all__ = ["NativeEngine"]
