"""Shared code of the service's gRPC processes: orders on standard input, progress on standard output. The input's end
means that the supervisor is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.log_stream import count_dropped_lines_in
from runahead.runtime.parent_death import signal_at_parents_death
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.log.logs import configure_serving_logs
from runahead.service.processes.front_end_process import ALIVE, ALIVE_S, DRAIN, END, FrontEndOrders, ServeOrder
from runahead.service.servers.server_options import Security, load_security
from runahead.service.settings.server_config import EXIT_CANNOT_START
from runahead.service.shared_memory.board import Board

_LINE_BYTES: Final = 16 << 20


Orders = TypeVar("Orders", bound=FrontEndOrders)


def serve_process(
    kind: type[Orders], serve: Callable[[Orders, Security, Board, asyncio.StreamReader], Awaitable[int]]
) -> int:
    """Run a process: read its orders, then serve. Returns the exit code.

    kind: the orders' type. serve: raises ConfigError, CheckpointError or EngineLostError if it can't.
    """
    _leave_signals_to_the_supervisor()
    return asyncio.run(_run(kind, serve))


async def _run(
    kind: type[Orders], serve: Callable[[Orders, Security, Board, asyncio.StreamReader], Awaitable[int]]
) -> int:
    lines = await _told_lines()
    try:
        orders = msgspec.json.decode(await lines.readline(), type=kind)
    except msgspec.DecodeError:
        return EXIT_CANNOT_START  # the supervisor is already gone
    configure_serving_logs(orders.settings.log, orders.library_lines)
    board = Board(orders.settings.frontends + 1, orders.board)
    count_dropped_lines_in(board.processes.dropped_lines(orders.name))
    try:
        return await serve(orders, load_security(orders.settings, orders.engine.spelling), board, lines)
    except (ConfigError, CheckpointError, EngineLostError) as error:
        print(f"runahead serve: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START


async def connected_engine(
    orders: FrontEndOrders, lines: asyncio.StreamReader
) -> tuple[SocketEngineClient, int] | None:
    """Wait for the order to serve. Returns the connected engine and the port to serve on, None if the process must end.

    Raises EngineLostError.
    """
    line = await lines.readline()
    if not line or line in (DRAIN, END):
        return None
    order = msgspec.json.decode(line, type=ServeOrder)
    client = await SocketEngineClient.connect(Path(order.socket), counters_from=orders.engine.counters_from)
    return client, order.port


def _leave_signals_to_the_supervisor() -> None:
    """Ignore signals, also those to the process group. The input's end replaces them."""
    signal_at_parents_death()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def keep_for_good() -> None:
    """Exempt everything made so far from garbage collection.

    Call it when everything is loaded, before the first call: a full collection takes tens of milliseconds, in which
    every call waits.
    """
    gc.collect()
    gc.freeze()


async def _told_lines() -> asyncio.StreamReader:
    """Open standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def say(line: bytes) -> None:
    """Write a line to the supervisor."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, which the input's end shows next
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


async def say_that_it_lives(each_time: Callable[[], None]) -> None:
    """Send signs of life from the event loop, periodically."""
    while True:
        await asyncio.sleep(ALIVE_S)
        each_time()
        say(ALIVE)
