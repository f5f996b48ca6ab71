"""Programmatic dependent launch (PDL): the next kernel starts while the previous one finishes.

A decoding step is about a hundred kernels of a few microseconds each, and the GPU would idle
between them. From Hopper on, a kernel may be launched before its predecessor has ended. It sets
itself up, then blocks in `wait` until all memory written by earlier kernels is visible. Every
kernel launched with `launch` must call `wait` before it touches memory that another kernel of the
step writes. Anything older (weights, positions, contexts, keys of earlier tokens) may be read or
prefetched before `wait`.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from ..hardware import is_hopper


@triton.jit
def wait(PDL: tl.constexpr):
    """Blocks until the previous kernel has completed and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel launch once every block of this one has called it.

    Call it at once if the next kernel is small. Otherwise call it near the end of the work: blocks
    that wait occupy their SMs, and the first to arrive would crowd onto the SMs that have room.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, PDL: tl.constexpr):
    """Prefetches one 128-byte line per pointer (or address) into L2.

    Too many prefetches at once delay the loads that are needed first.
    """
    if PDL:
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
    """Launches a kernel that calls `wait` and takes a constexpr `PDL`."""
    if not is_hopper(device):
        kernel[grid](*arguments, **options, PDL=False)
        return
    compiled = kernel[grid](*arguments, **options, PDL=True, launch_pdl=True)
    _prefer_shared_memory(compiled.function)


@functools.cache
def _prefer_shared_memory(function: int) -> None:
    """Sets a kernel's carve-out to the largest share of shared memory.

    An SM divides its memory between L1 cache and shared memory, by default as each kernel asks, and
    must be idle to change the division. With different carve-outs, kernels could not overlap.
    """
    if sys.platform == "linux":
        preferred_carveout, percent = 9, 100
        # A hint only: the kernel runs whatever the driver answers.
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(function), preferred_carveout, percent
        )
