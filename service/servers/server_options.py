"""Options, credentials and addresses of the service's gRPC servers.

`runahead.service.settings.server_config` checks that open access is intended.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.calls.access import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.credentials.tls import TlsFiles, server_credentials
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
