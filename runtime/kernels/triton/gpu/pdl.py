"""Programmatic dependent launch: a kernel may start while its predecessor runs, and waits before it uses its results.

A participating kernel lets its successor start with its first instruction. Before its wait, which ends when all
predecessors have ended and their writes are visible, it may load only weights, which no launch changes, and data that
was ready before F's first product: lengths, first query tokens, block tables, attention's split, older keys and values,
recurrent states. That product is launched normally, after apply and the beginning of F. Nothing is written before the
wait, and one program at least executes it, so the end of a kernel implies the end of all before.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.capability import current_gpu


def dependent_launch_works() -> bool:
    """Return whether the current device has programmatic dependent launch: compute capability 9.0 or higher."""
    gpu = current_gpu()
    return gpu is not None and gpu.knows_dependent_launch


@triton.jit
def let_dependents_start(DEPENDENT: tl.constexpr):
    """Let the next kernel start, if this one was launched programmatically."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessors(DEPENDENT: tl.constexpr):
    """Wait until all earlier kernels have ended, if this one was launched programmatically."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
