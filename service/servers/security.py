"""Loads authentication and TLS from settings. `runahead.service.settings.exposure` checks that open access is
intended.
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
