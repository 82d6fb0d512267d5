"""Compiles kernels ahead of their launch, as a start on a GPU does, for one that is not there: in a separate process.

`python -m tests.runtime.kernels.compiled_ahead` prints the JSON of `CompiledAhead`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.compilation import compiling
from tests.runtime.kernels.pretended_gpu import Address, NoGpu

SIZES = (16, 32, 64, 128)


class CompiledAhead(msgspec.Struct, frozen=True):
    """What rank 1 of two did, and rank 0 after it. compiled, found: sizes of the kernels that were compiled, and of
    those in the cache, in order. launchers: how many were made. launched: for each call inside, whether it returned a
    kernel. has: whether a call after it had its kernel. error: of a kernel that can't be compiled."""

    compiled: list[int]
    found: list[int]
    launchers: int
    launched: list[bool]
    has: bool
    error: str


@triton.jit
def _add(x, out, SIZE: tl.constexpr):
    tl.static_assert(SIZE != 256, "too wide")
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) + 1.0)


def main() -> CompiledAhead:
    os.sched_getaffinity = lambda process: {0}  # one after the other
    driver: Any = NoGpu((9, 0))
    launchers, compiled, found, launched, error = [], list[int](), list[int](), list[bool](), ""
    driver.launcher_cls = lambda *given: launchers.append(given)
    triton.runtime.driver.set_active(driver)

    def listen(*, src: Any, cache_hit: bool, **more: Any) -> None:
        (size,) = src.constants.values()
        (found if cache_hit else compiled).append(size)

    triton.knobs.compilation.listener = listen
    x = Address(torch.empty(512, device="meta"))
    for rank in (1, 0):
        _add.device_caches.clear()  # as in another process
        with compiling(rank, ranks=2):
            launched += [_add[(1,)](x, x, SIZE=size) is not None for size in (*SIZES, *SIZES)]
            assert len(compiled) + len(found) == len(SIZES) * (1 - rank), "all at once, at the end"
    _add.run(x, x, SIZE=SIZES[0], grid=(1,), warmup=True)
    has = len(compiled) + len(found) == 2 * len(SIZES)
    try:
        with compiling(0, ranks=1):
            _add[(1,)](x, x, SIZE=256)
    except triton.CompilationError as raised:
        error = str(raised)
    return CompiledAhead(compiled, found, len(launchers), launched, has, error)


if __name__ == "__main__":
    print(msgspec.json.encode(main()).decode())
