"""Programmatic dependent launch: a kernel may start while the one before it still runs, and waits where it needs it.

A kernel that takes part lets its successor start with its first instruction. Before it waits, until all before it have
ended and what they wrote is visible, it may ask for what no launch changes (weights) and for what was ready before the
first product of F began: lengths, where a row's query tokens begin, block tables, how attention is cut, older keys and
values, recurrent states. For that product is launched as usual, when apply and the beginning of F have ended. Nothing
else is read before the wait and nothing at all is written, and every program executes it, so that the end of a kernel
means the end of all before.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.capability import current_gpu


def dependent_launch_works() -> bool:
    """Whether the current device knows programmatic dependent launch: compute capability 9.0 or more."""
    gpu = current_gpu()
    return gpu is not None and gpu.knows_dependent_launch


@triton.jit
def let_dependents_start(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessors(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
