"""What the settings say about who may call. Whether they say it aloud enough is in
`runahead.service.settings.exposure`."""

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
    """access: who may call what. credentials: of the port; None listens in plain text."""

    access: Access
    credentials: grpc.ServerCredentials | None


def load_security(settings: FrontEndSettings, spelling: Spelling) -> Security:
    """Reads the files that checked settings name. Raises ConfigError."""
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
