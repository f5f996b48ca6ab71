"""Attention over packed rollouts, for the packed scorer."""

from .segment_attention import BLOCK, NAME, PackedPlan, Segments, packed_attention

__all__ = ["BLOCK", "NAME", "PackedPlan", "Segments", "packed_attention"]
