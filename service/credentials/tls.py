"""TLS of the server's port, with certificates that are read again when their files change.

A handshake uses the newest consistent files, unless their certificate has expired and the previous one has not. Open
connections keep theirs.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.credentials.watched_files import UnreadableError, WatchedFiles, read_regular

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER (X.690), and how certificates encode each time (RFC 5280, section 4.1.2.5).
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}

_WARNED: Final = timedelta(days=14)
_MOST_BYTES: Final = 16 << 20  # of a file; larger than a system's whole CA bundle

log = structlog.get_logger(__name__)


def valid_until(pem: str) -> datetime:
    """Return the earliest expiry in a certificate chain, in UTC. Raises ValueError for an invalid PEM chain."""
    return min(_end(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(pem))


def _end(der: bytes) -> datetime:
    """Return a certificate's expiry. Raises ValueError."""
    try:
        _, certificate, _ = _element(der)
        _, rest, _ = _element(certificate)  # the signed part
        tag, _, after = _element(rest)
        rest = after if tag == _VERSION else rest
        for _ in ("serial number", "algorithm", "issuer"):
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, validity = _element(validity)  # skip notBefore
        tag, value, _ = _element(validity)
        return datetime.strptime(value.decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
    except (IndexError, KeyError) as error:
        raise ValueError("a certificate has no end") from error


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Split the first element into its tag, its contents and the following bytes. Raises IndexError."""
    tag, length, begin = der[0], der[1], 2
    if length >= 0x80:
        begin += length - 0x80
        length = int.from_bytes(der[2:begin])
    return tag, der[begin : begin + length], der[begin + length :]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. certificate: the server's, followed by intermediates. client_ca: authorities of clients' certificates;
    None requests none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None

    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *(() if self.client_ca is None else (self.client_ca,)))


@dataclass(frozen=True, slots=True)
class _Configuration:
    """A TLS configuration. for_grpc: the library's form. until: its certificates' expiry."""

    for_grpc: Any
    until: datetime


class _Certificates:
    """Supplies handshakes with certificates. clock: the time in UTC."""

    def __init__(self, files: TlsFiles, clock: Callable[[], datetime]) -> None:
        self._files = files
        self._clock = clock
        self._told: tuple[datetime, str] | None = None
        self._is_first = True  # no certificate is in force yet
        self._watched = WatchedFiles(files.paths(), self._read, "certificate_not_read")
        self._is_first = False
        self._tell_of_end()

    @property
    def for_grpc(self) -> Any:
        return self._watched.contents.for_grpc

    def newer(self) -> Any:
        """Return a new configuration at a handshake, on gRPC's threads; None keeps the current one."""
        is_new = self._watched.refresh()
        if is_new:
            log.info("certificate_read", path=str(self._files.certificate))
        self._tell_of_end()
        return self.for_grpc if is_new else None

    def _read(self) -> _Configuration:
        """Read the files. Raises ConfigError for an expired certificate while the one in force is valid."""
        found, now = _configuration(self._files), self._clock()
        if not self._is_first and found.until <= now < self._watched.contents.until:
            raise ConfigError(f"{self._files.certificate} has expired, at {found.until}: the one before stays in force")
        return found

    def _tell_of_end(self) -> None:
        """Log once `_WARNED` before the certificate in force expires, and once when it has."""
        until, now = self._watched.contents.until, self._clock()
        if now < until - _WARNED:
            return
        event = "certificate_expires" if now < until else "certificate_expired"
        if self._told != (until, event):
            self._told = until, event
            (log.warning if now < until else log.error)(event, path=str(self._files.certificate), until=str(until))


def server_credentials(
    files: TlsFiles, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> grpc.ServerCredentials:
    """Make the server's credentials. Raises ConfigError that names the invalid file."""
    certificates = _Certificates(files, clock)
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        certificates.for_grpc, certificates.newer, require_client_authentication=files.client_ca is not None
    )
    return credentials


def _configuration(files: TlsFiles) -> _Configuration:
    """Read and check the files. Raises UnreadableError, or ConfigError, also for a key of another certificate."""
    contents = [read_regular(path, _MOST_BYTES) for path in files.paths()]
    try:
        # gRPC logs a mismatch of certificate and key only in its core's log, at every handshake.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key, password=_no_password)
        until = valid_until(contents[0].decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{files.certificate} and {files.key} are not a PEM certificate and its key without a password: {error}"
        ) from error
    except OSError as error:
        raise UnreadableError(f"{files.certificate} and {files.key} can't be read: {error.strerror}") from error
    authorities = contents[2] if files.client_ca is not None else None
    if authorities is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{files.client_ca} has no certificates in PEM: {error}") from error
    return _Configuration(grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], authorities), until)


def _no_password() -> str:
    """Return an empty password for an encrypted key: otherwise OpenSSL asks at the terminal."""
    return ""
