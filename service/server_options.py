"""What gRPC's own server is told: the bounds below the messages, where calls are still frames of HTTP/2."""

from __future__ import annotations

from typing import Final

from runahead.service.limits import LIMITS
from runahead.service.settings import FrontEndSettings

Options = tuple[tuple[str, int], ...]

_FIXED: Final[Options] = (
    ("grpc.max_receive_message_length", LIMITS.message_bytes),
    ("grpc.max_send_message_length", -1),
    # A client that vanished without a word is noticed within a minute, and its requests are cancelled.
    ("grpc.keepalive_time_ms", 40_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A connection that pings more often than this, three times over, is ended.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
)


def server_options(settings: FrontEndSettings) -> Options:
    """Arguments of `grpc.aio.server`."""
    handshake_ms = _milliseconds(settings.handshake_timeout_s)
    return (
        *_FIXED,
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_concurrent_streams", settings.max_connection_streams),
        ("grpc.max_connection_idle_ms", _milliseconds(settings.max_connection_idle_s)),
        ("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(settings.max_connection_age_grace_s)),
        # The one is for TLS, the other for the first frame behind it.
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.http2.settings_timeout", handshake_ms),
        # Between the two the library would refuse calls by chance.
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.server.max_pending_requests", settings.max_pending_calls),
        ("grpc.server.max_pending_requests_hard_limit", settings.max_pending_calls),
        ("grpc.server_max_unrequested_time_in_server", settings.pending_timeout_s),
        # Of one alone a second server on the port must fail. Of several, the supervisor holds a lock on the port.
        ("grpc.so_reuseport", int(settings.frontends > 1)),
    )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
