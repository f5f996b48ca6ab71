"""What the GPU at hand has, as far as kernels choose by it."""

from __future__ import annotations

import functools

import torch
import triton

PROCESSORS = 132
"""Of an H200, for which blocks are chosen."""


def is_nvidia(device: torch.device) -> bool:
    """Whether kernels for the device may use NVIDIA's own instructions.

    >>> is_nvidia(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has what came with Hopper: chained launches and bulk copies.

    >>> is_hopper(torch.device("cpu"))
    False
    """
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; those of an H200 where there is no GPU.

    >>> shared_memory(torch.device("cpu"))
    232448
    """
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
