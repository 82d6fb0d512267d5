"""Loops that a kernel unrolls: all of their turns may ask for something before any of it is used."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# (a kernel's tensors have no Python type)

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it beside every kernel)


@triton.jit
def longer(held, one):
    """The tuple `held`, and `one` behind it."""
    return held + (one,)  # noqa: RUF005 (of which a kernel knows nothing)
