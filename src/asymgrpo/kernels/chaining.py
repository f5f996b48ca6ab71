"""Kernels that follow each other closely: the next one is there before this one has ended.

A step of decoding is some hundred kernels of a few microseconds, and between two of them the device
idles. From Hopper on a kernel may be launched before the one ahead of it has ended (programmatic
dependent launch). It then sets itself up and waits in `follow` until all memory that the kernels
ahead wrote is there. Every kernel of a chain must call `follow` before it reads or writes what
another one of the chain does. What was there before the chain, weights, positions and contexts, it
reads ahead of that.
"""

# Kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from .hardware import is_hopper


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Waits for the kernel ahead."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def call_next(CHAINED: tl.constexpr):
    """Lets the next kernel set itself up, once all programs of this one are here.

    Best when most of the work is done: programs that wait take room on their processors, and those
    that come first would crowd where there is room.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


def chained(device: torch.device) -> dict[str, Any]:
    """What to launch a kernel with that calls `follow`.

    >>> chained(torch.device("cpu"))
    {'CHAINED': False}
    """
    return {"CHAINED": True, "launch_pdl": True} if is_hopper(device) else {"CHAINED": False}


def divided_alike(kernel: Any) -> None:
    """Has a compiled kernel run with as much shared memory as a processor can give.

    A processor divides its memory between cache and shared memory, by default as each kernel needs
    it, and must be idle to divide it anew: the kernels of a chain could not overlap.

    >>> divided_alike(None)  # what Triton's interpreter returns
    """
    function = getattr(kernel, "function", None)
    if function is not None and is_hopper(torch.device("cuda", torch.cuda.current_device())):
        _most_shared_memory(function)


@functools.cache
def _most_shared_memory(function: int) -> None:
    if sys.platform == "linux":
        preferred_carveout, percent = 9, 100
        # A preference, not a demand: whatever the driver answers, the kernel runs.
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(function), preferred_carveout, percent
        )
