"""Checks that an openly reachable server is intended. Imports no gRPC."""

from __future__ import annotations

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.loopback import is_loopback
from runahead.service.settings.settings import FrontEndSettings


def check_security(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Check the settings. Raises ConfigError for contradictions and for an address that is too open."""
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
