"""GRPO-family reinforcement learning that treats a rollout by the sign of its advantage.

>>> import torch
>>> from asymgrpo import Objective, TokenBatch, algorithm
>>> objective = Objective(algorithm("sa-ah-grpo", alpha=0.5))
>>> logps = torch.full((2, 4), -1.0, requires_grad=True)
>>> out = objective(TokenBatch(
...     logps=logps, old_logps=logps.detach(), mask=torch.ones(2, 4),
...     advantages=torch.tensor([1.0, -1.0]), entropies=torch.ones(2, 4), vocab_size=100))
>>> round(out.metrics["horizon/effective"], 3)
0.768
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asymgrpo.objective.batch import TokenBatch
    from asymgrpo.objective.config import ObjectiveConfig
    from asymgrpo.objective.objective import LossOutput, Objective
    from asymgrpo.objective.presets import ALGORITHMS, algorithm
    from asymgrpo.objective.trace import TokenTrace

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "LossOutput",
    "Objective",
    "ObjectiveConfig",
    "TokenBatch",
    "TokenTrace",
    "algorithm",
]

_HOME = {
    "ALGORITHMS": "presets",
    "LossOutput": "objective",
    "Objective": "objective",
    "ObjectiveConfig": "config",
    "TokenBatch": "batch",
    "TokenTrace": "trace",
    "algorithm": "presets",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: `import asymgrpo` does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'asymgrpo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asymgrpo.objective.{_HOME[name]}"), name)
