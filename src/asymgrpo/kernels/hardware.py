"""Properties of a device that kernels and engines size themselves by."""

from __future__ import annotations

import functools

import torch


def is_nvidia(device: torch.device) -> bool:
    """Whether kernels on this device may use inline PTX.

    >>> is_nvidia(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.cuda is not None


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device is Hopper or newer: programmatic dependent launch and TMA.

    >>> is_hopper(torch.device("cpu"))
    False
    """
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 on a CPU, where Triton's interpreter is serial.

    >>> sm_count(torch.device("cpu"))
    1
    """
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may use; unlimited on a CPU.

    >>> shared_memory(torch.device("cpu")) > 2**40
    True
    """
    if device.type != "cuda":
        return 1 << 62
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def free_memory(device: torch.device) -> int:
    """Bytes of GPU memory that can be allocated now, with what torch caches unused."""
    free = torch.cuda.mem_get_info(device)[0]
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
