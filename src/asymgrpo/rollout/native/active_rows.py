"""What the host knows of the rows of a wave while the device decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Look:
    """A device tensor's values of now, on their way to the host while the device goes on.

    >>> Look(torch.tensor([1, 0])).values()
    tensor([1, 0])
    """

    def __init__(self, source: Tensor) -> None:
        on_gpu = source.device.type == "cuda"
        # Into any other memory than pinned, the copy itself would wait.
        self._values = torch.empty_like(source, device="cpu", pin_memory=on_gpu)
        self._values.copy_(source, non_blocking=True)
        self._arrived: torch.Event | None = None
        if on_gpu:
            self._arrived = torch.cuda.current_stream(source.device).record_event()

    def values(self) -> Tensor:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


class Living:
    """The rows that may be alive after the steps that are under way, by their places in the batch.

    Rows start together, so a living row has as many tokens as there were steps, and its limit
    tells when it ends. Only of stop tokens does the host learn by a look.

    >>> living = Living([2, 9, 4])
    >>> living.ran(2)
    >>> living.saw(torch.tensor([0, 1, 1])), living.count, living.needed
    (None, 2, 7)
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = torch.tensor(limits, device="cpu")  # 0 for a row that has ended
        self._steps = 0

    def __len__(self) -> int:
        """Places that had a living row when rows last moved; they are the first."""
        return len(self._limits)

    @property
    def count(self) -> int:
        return int(self._limits.count_nonzero())

    @property
    def needed(self) -> int:
        """Steps after which all have certainly ended."""
        return max(0, int(self._limits.max()) - self._steps)

    def ran(self, steps: int) -> None:
        """So many steps more are done or under way."""
        self._steps += steps
        self._limits[self._limits <= self._steps] = 0

    def saw(self, alive: Tensor) -> None:
        """A look, of now or a few steps ago: 0 for each place whose row had ended."""
        self._limits[alive == 0] = 0

    def gather(self) -> Tensor:
        """Places of the living, which are the first places from now on."""
        left = self._limits.nonzero()[:, 0]
        self._limits = self._limits[left]
        return left
