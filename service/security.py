"""What the settings say about who may call, and whether they say it aloud enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.access import Access
from runahead.service.callers import CallersFile
from runahead.service.loopback import is_loopback
from runahead.service.settings import FrontEndSettings
from runahead.service.tls import TlsFiles, server_credentials


@dataclass(frozen=True, slots=True)
class Security:
    """access: who may call what. credentials: of the port; None listens in plain text."""

    access: Access
    credentials: grpc.ServerCredentials | None


def check_security(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Raises ConfigError for settings that contradict each other, and for an address that is too open for them."""
    host, tls = settings.host, bool(settings.tls_cert)
    asks = bool(settings.callers or settings.tls_client_ca)
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        if getattr(settings, one) and not getattr(settings, other):
            raise ConfigError(f"{spelling(one)} needs {spelling(other)} beside it")
    if settings.plaintext_tokens and (tls or not settings.callers):
        raise ConfigError(
            f"{spelling('plaintext_tokens')} has no effect: it is for a server with {spelling('callers')} and without "
            f"{spelling('tls_cert')}"
        )
    if is_loopback(host):
        return
    if not asks and not settings.insecure:
        raise ConfigError(
            f"{spelling('host')} {host!r} can be reached from other machines, and this server asks nobody who they "
            "are; listen on 127.0.0.1, or say with --callers or --tls-client-ca who may call, or add --insecure if the "
            "network is trusted"
        )
    if settings.callers and not tls and not settings.plaintext_tokens:
        raise ConfigError(
            f"{spelling('host')} {host!r} can be reached from other machines, and without TLS anybody on the way can "
            "read the callers' tokens; give --tls-cert and --tls-key, or add --plaintext-tokens if something in front "
            "of the server encrypts"
        )


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
