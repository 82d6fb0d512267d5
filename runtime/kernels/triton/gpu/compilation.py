"""Compiles the kernels of launches before the first launch, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Final

import triton
from triton.runtime.jit import JITFunction

_MOST_THREADS: Final = 16


@contextmanager
def compiling(rank: int, ranks: int) -> Iterator[None]:
    """Inside, kernels that are called are not launched, but all other calls run. On leaving, these kernels are compiled
    with their launchers, or read from the cache, in threads: Triton compiles without the interpreter's lock. One thread
    uses kernels meanwhile.

    rank: of `ranks`, which begin with different kernels and find the others' in the cache. Raises what a compilation
    raises.
    """
    run, compile_one = JITFunction.run, JITFunction._do_compile
    asked: dict[tuple[int, Any], Callable[[], Any]] = {}

    def run_without_launch(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *arguments, warmup=True, **options)

    def note(kernel: Any, key: Any, *more: Any, **named: Any) -> None:
        asked.setdefault((id(kernel), key), partial(compile_one, kernel, key, *more, **named))

    JITFunction.run, JITFunction._do_compile = run_without_launch, note
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_one
    kernels, first = list(asked.values()), len(asked) * rank // ranks
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks)
    with _one_parser(), ThreadPoolExecutor(max(1, threads), thread_name_prefix="compile") as workers:
        for _ in workers.map(_compiled, kernels[first:] + kernels[:first]):
            pass


@contextmanager
def _one_parser() -> Iterator[None]:
    """Inside, one thread at a time parses a kernel. Before Python 3.11.8 and 3.12.2 all threads count the depth of
    their syntax trees in one number, and `ast.parse` raises SystemError if another thread has changed it."""
    parse, lock = JITFunction.parse, Lock()

    def parse_alone(kernel: Any) -> Any:
        with lock:
            return parse(kernel)

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse


def _compiled(compile_one: Callable[[], Any]) -> None:
    kernel = compile_one()
    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # is kept in the cache, too
