"""Shared code of the service's gRPC processes: orders on standard input, progress on standard output, and the options,
credentials and addresses of their servers.

The input's end means that the supervisor is gone. `runahead.service.settings.server_config` checks that open access is
intended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc
import msgspec

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.log_output import count_dropped_lines_in
from runahead.runtime.process_end import signal_at_parents_death
from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.credentials.tls import TlsFiles, server_credentials
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import EngineLostError
from runahead.service.log.logs import configure_serving_logs
from runahead.service.processes.children import ALIVE, ALIVE_S, DRAIN, END, FrontEndOrders, ServeOrder
from runahead.service.settings.server_config import EXIT_CANNOT_START
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board

GENERATION: Final = "runahead.v1.GenerationService"
HEALTH: Final = "grpc.health.v1.Health"

Options = tuple[tuple[str, int], ...]

_LINE_BYTES: Final = 16 << 20


Orders = TypeVar("Orders", bound=FrontEndOrders)


def server_options(settings: FrontEndSettings) -> Options:
    """Return arguments of `grpc.aio.server`."""
    handshake_ms = _milliseconds(settings.handshake_timeout_s)
    return (
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_send_message_length", settings.max_response_bytes),
        # Detects clients that vanished, with or without calls, and cancels their requests.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        # Otherwise a client that pings an idle connection is disconnected after three pings, however rare.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(settings.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", settings.max_ping_strikes),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.max_connection_streams),
        ("grpc.max_connection_idle_ms", _milliseconds(settings.max_connection_idle_s)),
        ("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(settings.max_connection_age_grace_s)),
        # One is for TLS, the other for the first frame after it.
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.http2.settings_timeout", handshake_ms),
        # Between the two bounds the library would refuse calls at random.
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.server.max_pending_requests", settings.max_pending_calls),
        ("grpc.server.max_pending_requests_hard_limit", settings.max_pending_calls),
        ("grpc.server_max_unrequested_time_in_server", settings.pending_timeout_s),
        # With one front end, a second server on the port must fail. With several, the supervisor holds a lock on the
        # port.
        ("grpc.so_reuseport", int(settings.frontends > 1)),
    )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Security:
    """A front end's security. access: authentication. credentials: of the port; None for plain text."""

    access: Access
    credentials: grpc.ServerCredentials | None


def load_security(settings: FrontEndSettings, spelling: Spelling) -> Security:
    """Read the files of checked settings. Raises ConfigError."""
    callers = CallersFile(Path(settings.callers)) if settings.callers else None
    if callers is not None and callers.has_certificates and not settings.tls_client_ca:
        raise ConfigError(
            f"{spelling('callers')} names callers by their certificates, which clients are only asked for with "
            f"{spelling('tls_client_ca')}"
        )
    credentials = None
    if settings.tls_cert:
        client_ca = Path(settings.tls_client_ca) if settings.tls_client_ca else None
        credentials = server_credentials(TlsFiles(Path(settings.tls_cert), Path(settings.tls_key), client_ca))
    return Security(Access(callers, certificates=bool(settings.tls_client_ca)), credentials)


def listen(server: grpc.aio.Server, host: str, number: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen and return the port. host: an IPv6 address with or without brackets. number: 0 for any. credentials: None
    for plain text. Raises ConfigError.
    """
    host = host.strip("[]")
    address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    try:
        if credentials is None:
            port = int(server.add_insecure_port(address))
        else:
            port = int(server.add_secure_port(address, credentials))
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"{address} can't be listened on: it is in use, or no address of this machine")
    return port


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
