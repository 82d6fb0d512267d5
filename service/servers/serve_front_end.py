"""A front end's process: `python -m runahead.service.servers.serve_front_end`, started by the supervisor.

Lines on standard input (`runahead.service.processes.front_end_process`) tell it its orders, when to serve, to drain and
to end. The input's end means that the supervisor is gone, and it ends at once. Only the supervisor handles signals.
Exit codes: 0 after a shutdown, 1 if the engine was lost or calls are no longer taken, 2 if it could not start.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.processes.front_end_process import DRAIN, LOADED, FrontEndOrders
from runahead.service.servers.front_end import FrontEnd
from runahead.service.servers.server_options import Security
from runahead.service.servers.supervised import connected_engine, keep_for_good, say, say_that_it_lives, serve_process
from runahead.service.settings.bounded_files import FileError, read_text
from runahead.service.settings.server_config import EXIT_ENGINE_LOST, EXIT_OK, EXIT_SERVER_ENDED
from runahead.service.shared_memory.board import Board
from runahead.service.text.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from runahead.service.calls.spans import Spans

log = structlog.get_logger(__name__)

_TEMPLATE_BYTES: Final = 1 << 20  # of a chat template file


def main() -> int:
    """Serve until told to end. Returns the exit code."""
    return serve_process(FrontEndOrders, _serve)


async def _serve(orders: FrontEndOrders, security: Security, board: Board, lines: asyncio.StreamReader) -> int:
    """Serve. Raises ConfigError, CheckpointError or EngineLostError if it can't."""
    tokenizer = _tokenizer(orders)
    say(LOADED)
    try:
        found = await connected_engine(orders, lines)
        if found is None:
            return EXIT_OK
        client, number = found
        spans = _spans(orders, client.info.model)
        front_end = FrontEnd(client, tokenizer, orders.settings, security, board, orders.index, orders.version, spans)
        keep_for_good()
        port = await front_end.start(orders.settings.host, number)
        say(b"ready %d" % port)
        alive = asyncio.create_task(say_that_it_lives(front_end.take_stock))
        try:
            return await _until_the_end(orders, client, front_end, lines)
        finally:
            alive.cancel()
            if spans is not None:
                spans.close()
    finally:
        if tokenizer is not None:
            await tokenizer.close()


def _spans(orders: FrontEndOrders, model: str) -> Spans | None:
    """Make the span exporter if configured; loaded on demand, because it needs an extra."""
    if not orders.settings.otlp_endpoint:
        return None
    from runahead.service.calls.spans import Spans

    return Spans(orders.settings.otlp_endpoint, model, orders.version)


async def _until_the_end(
    orders: FrontEndOrders, client: SocketEngineClient, front_end: FrontEnd, lines: asyncio.StreamReader
) -> int:
    told = asyncio.ensure_future(lines.readline())
    lost, ended = asyncio.ensure_future(client.wait_lost()), asyncio.ensure_future(front_end.wait_ended())
    await asyncio.wait({told, lost, ended}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        log.error("server_ended", why=ended.result())
        lost.cancel()
        told.cancel()
        await front_end.stop(0.0)
        return EXIT_SERVER_ENDED
    ended.cancel()
    if lost.done():
        log.error("engine_lost", reason=lost.result().reason)
        front_end.engine_lost()
        await asyncio.wait({told}, timeout=orders.linger_s)
        told.cancel()
        await front_end.stop(0.0)
        return EXIT_ENGINE_LOST
    lost.cancel()
    if told.result() != DRAIN:
        await front_end.stop(0.0)
        return EXIT_OK
    log.info("draining", open_streams=front_end.servicer.counters.open_streams)
    draining = asyncio.ensure_future(front_end.stop(orders.settings.shutdown_grace_s))
    hurry = asyncio.ensure_future(lines.readline())  # any line, and the end of the input
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    front_end.hurry()
    hurry.cancel()
    await draining
    return EXIT_OK


def _tokenizer(orders: FrontEndOrders) -> TextTokenizer | None:
    """Load the checkpoint's tokenizer, unless disabled or missing beside random weights.

    Raises ConfigError or CheckpointError.
    """
    if orders.settings.tokenizer == "none":
        if orders.settings.chat_template:
            spelling = orders.engine.spelling
            raise ConfigError(f"{spelling('chat_template')} has no effect with {spelling('tokenizer')} none")
        return None
    checkpoint = open_checkpoint(Path(orders.engine.model))
    if orders.engine.load_format == "dummy" and not checkpoint.has_tokenizer:
        log.warning(
            "no_tokenizer",
            why=f"{checkpoint.path} has no tokenizer; random weights are served without: token ids only",
        )
        return None
    return load_tokenizer(checkpoint, _chat_template(orders))


def _chat_template(orders: FrontEndOrders) -> str | None:
    """Read the configured template, None without one. Raises ConfigError for an unreadable file."""
    path = orders.settings.chat_template
    if not path:
        return None
    spelling = orders.engine.spelling("chat_template")
    try:
        return read_text(path, _TEMPLATE_BYTES)
    except FileError as error:
        raise ConfigError(f"{spelling} {path} can't be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
