"""The process of the side server: `python -m runahead.service.servers.serve_side`, started by the supervisor.

It is told what to do as a front end is (`runahead.service.processes.front_end_process` has the lines). It listens for
health probes and for Prometheus from the beginning, when there is no engine yet, and for an operator's calls when there
is one.
Exit codes: 0 after a shutdown, 2 if it could not start.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import structlog

from runahead.runtime.log_stream import count_dropped_lines_in
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.log.logs import configure_serving_logs
from runahead.service.processes.front_end_process import DRAIN, END, LOADED, ServeOrder, SideOrders
from runahead.service.servers.security import load_security
from runahead.service.servers.side_server import SideServer
from runahead.service.servers.supervised import (
    keep_for_good,
    leave_signals_to_the_supervisor,
    say,
    say_that_it_lives,
    told_lines,
)
from runahead.service.settings.server_config import EXIT_CANNOT_START, EXIT_OK
from runahead.service.shared_memory.board import Board

log = structlog.get_logger(__name__)


def main() -> int:
    """Serves until it is told to end. Returns the exit code."""
    leave_signals_to_the_supervisor()
    return asyncio.run(_main())


async def _main() -> int:
    lines = await told_lines()
    try:
        orders = msgspec.json.decode(await lines.readline(), type=SideOrders)
    except msgspec.DecodeError:
        return EXIT_CANNOT_START  # the supervisor has gone again
    configure_serving_logs(orders.settings.log, orders.library_lines)
    board = Board(orders.settings.frontends + 1, orders.board)
    count_dropped_lines_in(board.processes.dropped_lines(orders.name))
    try:
        security = load_security(orders.settings, orders.engine.spelling)
        side = SideServer(orders.settings, security, board, orders.index, orders.version)
        keep_for_good()
        say(LOADED + b" %d %d" % await side.listen(orders.health_port, orders.metrics_port))
        try:
            return await _serve(orders, side, lines)
        finally:
            await side.stop()
    except (ConfigError, EngineLostError) as error:
        print(f"runahead serve: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_START


async def _serve(orders: SideOrders, side: SideServer, lines: asyncio.StreamReader) -> int:
    """Raises ConfigError or EngineLostError if it can't."""
    line = await lines.readline()
    if not line or line in (DRAIN, END):
        return EXIT_OK
    order = msgspec.json.decode(line, type=ServeOrder)
    client = await SocketEngineClient.connect(Path(order.socket), counters_from=orders.engine.counters_from)
    say(b"ready %d" % await side.serve(client, order.port))
    alive = asyncio.create_task(say_that_it_lives(lambda: None))
    lost = asyncio.create_task(_tell_of_loss(client, side))
    try:
        while await lines.readline() == DRAIN:
            side.drain()
    finally:
        alive.cancel()
        lost.cancel()
    return EXIT_OK


async def _tell_of_loss(client: SocketEngineClient, side: SideServer) -> None:
    await client.wait_lost()
    side.engine_lost()


if __name__ == "__main__":
    sys.exit(main())
