"""What the host knows about the rows of a batch while the device decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a device tensor to the host, which does not stall the device.

    >>> HostCopy(torch.tensor([1, 0])).values()
    tensor([1, 0])
    """

    def __init__(self, source: Tensor) -> None:
        on_gpu = source.device.type == "cuda"
        # A copy into pageable memory would be synchronous.
        self._values = torch.empty_like(source, device="cpu", pin_memory=on_gpu)
        self._values.copy_(source, non_blocking=True)
        self._arrived: torch.Event | None = None
        if on_gpu:
            self._arrived = torch.cuda.current_stream(source.device).record_event()

    def values(self) -> Tensor:
        """The values at the time of the copy; blocks until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


class ActiveRows:
    """The rows that may be active after the steps issued so far, by their places in the batch.

    Rows start together, so an active row has as many tokens as there were steps, and its limit says
    when it ends. Only for stop tokens does the host need a copy from the device.

    >>> active = ActiveRows([2, 9, 4])
    >>> active.advance(2)
    >>> active.observe(torch.tensor([0, 1, 1])), active.count, active.needed
    (None, 2, 7)
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = torch.tensor(limits, device="cpu")  # 0 for a finished row
        self._steps = 0

    def __len__(self) -> int:
        """Places in use since the last compaction; they are the first ones."""
        return len(self._limits)

    @property
    def count(self) -> int:
        """Rows that may be active."""
        return int(self._limits.count_nonzero())

    @property
    def needed(self) -> int:
        """Steps after which all rows have certainly ended."""
        return max(0, int(self._limits.max()) - self._steps)

    def advance(self, steps: int) -> None:
        """Records that `steps` more steps were issued."""
        self._steps += steps
        self._limits[self._limits <= self._steps] = 0

    def observe(self, alive: Tensor) -> None:
        """Takes what the device reported, possibly some steps ago: 0 for each finished row."""
        self._limits[alive == 0] = 0

    def compact(self) -> Tensor:
        """The places of active rows, which become the first places."""
        left = self._limits.nonzero()[:, 0]
        self._limits = self._limits[left]
        return left
