"""A launch's marks and stamps on CUDA: numbers that the device writes into mapped memory and the host polls.

Each kernel is one program of one warp. A counter on the device has the running launch's number, so that a captured
graph contains none.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

SAMPLED: Final = 0
ENDED: Final = 1
MARKS: Final = 2
_SAMPLED = tl.constexpr(SAMPLED)
_ENDED = tl.constexpr(ENDED)


@triton.jit
def _release(pointer, value):
    """Store `value` so that the host sees it only after all earlier stores of this stream."""
    tl.inline_asm_elementwise(
        "{ fence.acq_rel.sys; st.volatile.global.b64 [$1], $2; mov.u32 $0, 0; }",
        "=r,l,l",
        [pointer.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _start_kernel(counter, start_ns, SLOTS: tl.constexpr):
    number = tl.load(counter) + 1
    tl.store(counter, number)
    tl.store(start_ns + number % SLOTS, tl.extra.cuda.globaltimer().to(tl.int64))


@triton.jit
def _sampled_kernel(counter, marks):
    _release(marks + _SAMPLED, tl.load(counter))


@triton.jit
def _ended_kernel(counter, marks, end_ns, SLOTS: tl.constexpr):
    number = tl.load(counter)
    tl.store(end_ns + number % SLOTS, tl.extra.cuda.globaltimer().to(tl.int64))
    _release(marks + _ENDED, number)


def start(counter: torch.Tensor, start_ns: torch.Tensor) -> None:
    """Begin S: advance the counter, int64 [1], and stamp the device's clock into mapped `start_ns`, int64 [slots]."""
    _start_kernel[(1,)](counter, start_ns, SLOTS=start_ns.shape[0], num_warps=1)


def sampled(counter: torch.Tensor, marks: torch.Tensor) -> None:
    """End S: write the launch's number into mapped `marks`, int64 [MARKS], behind a system fence."""
    _sampled_kernel[(1,)](counter, marks, num_warps=1)


def ended(counter: torch.Tensor, marks: torch.Tensor, end_ns: torch.Tensor) -> None:
    """End F: write the device's clock into mapped `end_ns`, int64 [slots], then the launch's number into `marks`."""
    _ended_kernel[(1,)](counter, marks, end_ns, SLOTS=end_ns.shape[0], num_warps=1)
