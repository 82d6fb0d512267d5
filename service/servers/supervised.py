"""What every gRPC process of the service has in common: it is told what to do by lines on standard input, and says on
standard output how far it is. At the input's end the supervisor is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable
from typing import Final

from runahead.runtime.parent_death import signal_at_parents_death
from runahead.service.processes.front_end_process import ALIVE, ALIVE_S

_LINE_BYTES: Final = 16 << 20


def leave_signals_to_the_supervisor() -> None:
    """Those, too, that a whole group of processes gets. When it is gone, so is this process."""
    signal_at_parents_death()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def keep_for_good() -> None:
    """What was made so far lives as long as the process: no collection of Python's looks at it again.

    Called when everything is loaded, before the first call: to look at it all takes tens of milliseconds each time, in
    which every call of the process waits.
    """
    gc.collect()
    gc.freeze()


async def told_lines() -> asyncio.StreamReader:
    """Of standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def say(line: bytes) -> None:
    """To the supervisor."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, which the input's end says next
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


async def say_that_it_lives(each_time: Callable[[], None]) -> None:
    """Again and again, from the event loop whose life is meant."""
    while True:
        await asyncio.sleep(ALIVE_S)
        each_time()
        say(ALIVE)
