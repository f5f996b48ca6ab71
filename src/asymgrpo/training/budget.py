"""How many packed tokens fit in memory at once: measured, then halved if that was too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from asymgrpo.kernels.hardware import free_memory
from asymgrpo.models.description import text_config
from asymgrpo.training.packing import Group, cut
from asymgrpo.training.shrinking import halved

# The first pass holds no more than this before its memory is known.
_PROBE = 4096
# Passes that keep no activations, before anything is measured.
_FORWARD_ONLY = 65_536
# Left to fragmentation and to what other code allocates in the meantime.
_SHARE = 0.85


class TokenBudget:
    """The most packed tokens of one pass, with activations held and without.

    `fixed` is a user's own figure for passes with activations; None asks for a measurement, which
    needs a GPU: elsewhere there is no limit. `free_memory` is asked before the budget is cut.

    >>> TokenBudget(None, print).tokens(trains=True) is None
    True
    """

    def __init__(
        self,
        fixed: int | None,
        say: Callable[[str], None],
        free_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        self._held = fixed
        self._forward_only: int | None = fixed
        self._measured = fixed is not None
        self._say = say
        self._free_memory = free_memory

    def tokens(self, trains: bool) -> int | None:
        """The current budget; None is no limit."""
        return self._held if trains else self._forward_only

    def measure(
        self,
        run: Callable[[list[Group]], Any],
        groups: list[Group],
        causal: Any,
        device: torch.device,
        trains: bool,
    ) -> None:
        """Learn the bytes a token holds from the first pass with activations on a GPU."""
        if self._measured or device.type != "cuda":
            return
        if not trains:
            self._forward_only = self._forward_only or _FORWARD_ONLY
            return
        self._measured = True
        probe = cut(groups, _PROBE)[0]
        run(probe)  # compilation and workspaces are not activations
        before = torch.cuda.memory_allocated(device)
        held = run(probe)
        bytes_a_token = (torch.cuda.memory_allocated(device) - before) / sum(
            group.fed for group in probe
        )
        del held
        layers = text_config(causal).num_hidden_layers
        # The backward pass holds about two layers' worth of gradients beside the activations.
        bytes_a_token *= 1 + 2 / layers
        bytes_a_token = max(bytes_a_token, 1.0)
        self._held = int(_SHARE * free_memory(device) / bytes_a_token)
        if self._held < sum(group.fed for group in groups) and self._free_memory():
            self._held = int(_SHARE * free_memory(device) / bytes_a_token)
        self._forward_only = self._held * max(1, layers // 4)

    def halve(self, trains: bool, tokens: int) -> bool:
        """After running out of memory on `tokens` packed tokens: half of what was tried.

        Where others could free memory nothing is cut, and it says False.
        """
        torch.cuda.empty_cache()
        if self._free_memory():
            return False
        tried = min(tokens, self.tokens(trains) or tokens)
        fewer = halved(tried, "update", "tokens", self._say)
        if trains:
            self._held = fewer
        else:
            self._forward_only = fewer
        return True


def trainable(causal: nn.Module) -> list[nn.Parameter]:
    """Parameters that take a gradient.

    >>> len(trainable(nn.Linear(2, 3)))
    2
    """
    return [p for p in causal.parameters() if p.requires_grad]
