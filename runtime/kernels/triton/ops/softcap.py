"""Soft cap of logits: bounds them by a tanh in place."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_BLOCK: Final = 2048


_TWICE_LOG2_E = tl.constexpr(2.0 * 1.4426950408889634)


@triton.jit
def bounded(score, CAP: tl.constexpr):
    """Return CAP * tanh(score / CAP), float32, if CAP is above 0, with an error of about 1e-7 of CAP."""
    if CAP > 0.0:
        score = CAP * (2.0 / (1.0 + tl.exp2(score * (-_TWICE_LOG2_E / CAP))) - 1.0)
    return score


@triton.jit
def _bound_kernel(logits, targets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr):
    """Bound BLOCK logits of a row."""
    row = tl.program_id(0).to(tl.int64)
    if targets is not None:
        row = tl.load(targets + row).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + row * WIDTH + i, mask=i < WIDTH, other=0.0)
    tl.store(logits + row * WIDTH + i, bounded(found, CAP), mask=i < WIDTH)


def bound_logits(logits: torch.Tensor, cap: float, targets: torch.Tensor | None = None) -> None:
    """Compute logits = cap * tanh(logits / cap) in place. logits: float32, contiguous [m, vocab]. targets: int32 [n],
    the rows to bound, each once; a duplicate row is undefined. None: all rows.
    """
    rows, width = logits.shape
    rows = rows if targets is None else targets.shape[0]
    _bound_kernel[(rows, triton.cdiv(width, _BLOCK))](logits, targets, WIDTH=width, BLOCK=_BLOCK, CAP=cap, num_warps=4)
