"""Kernels that follow each other closely: the next one is there before this one has ended.

A step of decoding is some hundred kernels of a few microseconds, and between two of them the device
idles. From Hopper on a kernel may be launched before the one ahead of it has ended (programmatic
dependent launch). It then sets itself up and waits in `follow` until all memory that the kernels
ahead wrote is there. Every kernel of a chain must call `follow` before it reads or writes what
another one of the chain does. What was there before the chain, weights, positions, contexts and the
keys of earlier tokens, it reads or asks for ahead of that.
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

    At once where the next one is small. Else best when most of the work is done: programs that wait
    take room on their processors, and those that come first would crowd where there is room.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(pointers, CHAINED: tl.constexpr):
    """Has lines of 128 bytes brought to the second-level cache, one for each pointer or address.

    Many at once delay those that are needed first.
    """
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Launches a kernel that calls `follow` and has a constant `CHAINED`."""
    if not is_hopper(device):
        kernel[grid](*arguments, **options, CHAINED=False)
        return
    compiled = kernel[grid](*arguments, **options, CHAINED=True, launch_pdl=True)
    _prefer_shared_memory(compiled.function)


@functools.cache
def _prefer_shared_memory(function: int) -> None:
    """Has a kernel run with as much shared memory as a processor can give.

    A processor divides its memory between cache and shared memory, by default as each kernel needs
    it, and must be idle to divide it anew: the kernels of a chain could not overlap.
    """
    if sys.platform == "linux":
        preferred_carveout, percent = 9, 100
        # A preference, not a demand: whatever the driver answers, the kernel runs.
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(function), preferred_carveout, percent
        )
