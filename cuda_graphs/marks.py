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
TAIL: Final = 1
ENDED: Final = 2
MARKS: Final = 3
_SAMPLED = tl.constexpr(SAMPLED)
_TAIL = tl.constexpr(TAIL)
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
def _sampled_kernel(counter, marks, IN_TAIL: tl.constexpr):
    number = tl.load(counter)
    if IN_TAIL:  # first, so that a host that sees the launch sampled sees this, too
        _release(marks + _TAIL, number)
    _release(marks + _SAMPLED, number)


@triton.jit
def _tail_kernel(counter, marks):
    _release(marks + _TAIL, tl.load(counter))


@triton.jit
def _ended_kernel(counter, marks, end_ns, SLOTS: tl.constexpr):
    number = tl.load(counter)
    tl.store(end_ns + number % SLOTS, tl.extra.cuda.globaltimer().to(tl.int64))
    _release(marks + _ENDED, number)


def start(counter: torch.Tensor, start_ns: torch.Tensor) -> None:
    """Begin S: advance the counter, int64 [1], and stamp the device's clock into mapped `start_ns`, int64 [slots]."""
    _start_kernel[(1,)](counter, start_ns, SLOTS=start_ns.shape[0], num_warps=1)


def sampled(counter: torch.Tensor, marks: torch.Tensor, *, in_tail: bool) -> None:
    """End S: write the launch's number into mapped `marks`, int64 [MARKS], behind a system fence. in_tail: the rest of
    the launch is its tail."""
    _sampled_kernel[(1,)](counter, marks, IN_TAIL=in_tail, num_warps=1)


def tail(counter: torch.Tensor, marks: torch.Tensor) -> None:
    """Begin the tail of F: write the launch's number into `marks`."""
    _tail_kernel[(1,)](counter, marks, num_warps=1)


def ended(counter: torch.Tensor, marks: torch.Tensor, end_ns: torch.Tensor) -> None:
    """End F: write the device's clock into mapped `end_ns`, int64 [slots], then the launch's number into `marks`."""
    _ended_kernel[(1,)](counter, marks, end_ns, SLOTS=end_ns.shape[0], num_warps=1)
