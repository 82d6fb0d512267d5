"""Unrolled loops: all iterations may issue loads before any result is used."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# (a kernel's tensors have no Python type)

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it beside every kernel)


@triton.jit
def longer(held, one):
    """Append `one` to the tuple `held`."""
    return held + (one,)  # noqa: RUF005 (of which a kernel knows nothing)
