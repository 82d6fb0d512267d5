"""TLS of the server's port, with certificates that are read again when their files change.

A handshake takes the newest files that fit together; connections that are open stay as they are.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.credentials.watched_files import UnreadableError, WatchedFiles

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. certificate: the server's, and those between it and its authority behind it. client_ca: authorities of
    clients' certificates; None asks clients for none."""

    certificate: Path
    key: Path
    client_ca: Path | None

    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *(() if self.client_ca is None else (self.client_ca,)))


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises ConfigError naming the file that can't be used."""
    watched = WatchedFiles(files.paths(), lambda: _configuration(files), "certificate_not_read")

    def newer() -> Any:
        """gRPC asks for it at every handshake, from threads of its own. None: what it has stays."""
        if not watched.look():
            return None
        log.info("certificate_read", path=str(files.certificate))
        return watched.contents

    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        watched.contents, newer, require_client_authentication=files.client_ca is not None
    )
    return credentials


def _configuration(files: TlsFiles) -> Any:
    """Raises UnreadableError, or ConfigError, for a key that is not the certificate's too."""
    contents = []
    for path in files.paths():
        try:
            contents.append(path.read_bytes())
        except OSError as error:
            raise UnreadableError(f"{path} can't be read: {error.strerror}") from error
    try:
        # gRPC would say that a certificate and a key do not fit only in its own log, at every handshake.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{files.certificate} and {files.key} are no certificate in PEM and its key, without a password: {error}"
        ) from error
    except OSError as error:
        raise UnreadableError(f"{files.certificate} and {files.key} can't be read: {error.strerror}") from error
    authorities = contents[2] if files.client_ca is not None else None
    if authorities is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{files.client_ca} has no certificates in PEM: {error}") from error
    return grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], authorities)


def _no_password() -> str:
    """For a key that asks for one: without this, OpenSSL would ask at the terminal."""
    return ""
