"""What gRPC's own server is told: the bounds below the messages, where calls are still frames of HTTP/2."""

from __future__ import annotations

from runahead.service.settings.settings import FrontEndSettings

Options = tuple[tuple[str, int], ...]


def server_options(settings: FrontEndSettings) -> Options:
    """Arguments of `grpc.aio.server`."""
    handshake_ms = _milliseconds(settings.handshake_timeout_s)
    return (
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_send_message_length", settings.max_response_bytes),
        # A client that has vanished without a word is noticed, with calls or without, and its requests are cancelled.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_s)),
        # Without it a client that keeps an idle connection alive is sent away after three pings, however rare.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(settings.min_ping_interval_s)),
        ("grpc.http2.max_ping_strikes", settings.max_ping_strikes),
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
