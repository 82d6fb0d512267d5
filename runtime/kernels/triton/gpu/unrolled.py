"""Tuples of tensors: unrolled loops, of which all iterations may issue loads before any result is used."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# (a kernel's tensors have no Python type)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def longer(tensors, one):
    """Append a tensor to a tuple of tensors. Not a tuple to a tuple: Triton tells two calls apart by all tensors in
    their arguments, wherever they are nested."""
    return tensors + (one,)  # noqa: RUF005 (of which a kernel knows nothing)


@triton.jit
def joined(parts):
    """Join eight tensors, [..., 2, 2, 2]: the last dimension is the number's lowest bit."""
    a, b, c, d, e, f, g, h = parts
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
