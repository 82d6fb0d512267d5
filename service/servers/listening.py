"""Listening on an address, for each of the service's gRPC servers."""

from __future__ import annotations

import grpc

from runahead.runtime.wire.engine_config import ConfigError


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
