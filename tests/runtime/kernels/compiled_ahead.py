"""Compiles kernels ahead of their launch, as a start on a GPU does, for one that is not there: in a separate process.

`python -m tests.runtime.kernels.compiled_ahead` prints the JSON of `CompiledAhead`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import ast
import os
from threading import Condition
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.compilation import compiling
from tests.runtime.kernels.pretended_gpu import Address, NoGpu

SIZES = (16, 32, 64, 128)
MORE_SIZES = (512, 1024)
MEETING_S = 0.2  # for which a thread that parses waits for another one


class CompiledAhead(msgspec.Struct, frozen=True):
    """What rank 1 of two did, and rank 0 after it. compiled, found: sizes of the kernels that were compiled, and of
    those in the cache, in order. launchers: how many were made. launched: for each call inside, whether it returned a
    kernel. has: whether a call after it had its kernel. error: of a kernel that can't be compiled. parsing: most
    threads that parsed kernels at a time."""

    compiled: list[int]
    found: list[int]
    launchers: int
    launched: list[bool]
    has: bool
    error: str
    parsing: int


class Parser:
    """Counts the threads within `ast.parse`, where each waits for another one."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._changed, self._parse = Condition(), ast.parse

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most > 1, MEETING_S)
            self._now -= 1
        return self._parse(*given, **named)


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
    os.sched_getaffinity = lambda process: {0, 1}
    parser = Parser()
    vars(ast)["parse"] = parser
    done = len(launchers)
    with compiling(0, ranks=1):
        for size in MORE_SIZES:
            _add[(1,)](x, x, SIZE=size)
    assert len(launchers) == done + len(MORE_SIZES) and parser.most
    return CompiledAhead(compiled[: len(SIZES)], found, done, launched, has, error, parser.most)


if __name__ == "__main__":
    print(msgspec.json.encode(main()).decode())
