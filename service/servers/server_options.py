"""Options of the gRPC server: limits below messages, at the level of HTTP/2 frames."""

from __future__ import annotations

from runahead.service.settings.settings import FrontEndSettings

Options = tuple[tuple[str, int], ...]


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
