"""The side server's process: `python -m runahead.service.servers.serve_side`, started by the supervisor.

It takes orders like a front end (`runahead.service.processes.front_end_process`). Serves health and metrics at once,
and operators' calls when the engine runs. Exit codes: 0 after a shutdown, 2 if it could not start.
"""

from __future__ import annotations

import asyncio
import sys

import structlog

from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.processes.front_end_process import DRAIN, LOADED, SideOrders
from runahead.service.servers.security import Security
from runahead.service.servers.side_server import SideServer
from runahead.service.servers.supervised import connected_engine, keep_for_good, say, say_that_it_lives, serve_process
from runahead.service.settings.server_config import EXIT_OK
from runahead.service.shared_memory.board import Board

log = structlog.get_logger(__name__)


def main() -> int:
    """Serve until told to end. Returns the exit code."""
    return serve_process(SideOrders, _serve)


async def _serve(orders: SideOrders, security: Security, board: Board, lines: asyncio.StreamReader) -> int:
    """Serve. Raises ConfigError or EngineLostError if it can't."""
    side = SideServer(orders.settings, security, board, orders.index, orders.version)
    keep_for_good()
    say(LOADED + b" %d %d" % await side.listen(orders.health_port, orders.metrics_port))
    try:
        return await _serve_engine(orders, side, lines)
    finally:
        await side.stop()


async def _serve_engine(orders: SideOrders, side: SideServer, lines: asyncio.StreamReader) -> int:
    """Serve the control port once the engine runs."""
    found = await connected_engine(orders, lines)
    if found is None:
        return EXIT_OK
    client, port = found
    say(b"ready %d" % await side.serve(client, port))
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
