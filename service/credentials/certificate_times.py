"""Reads when certificates expire."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER (X.690), and how certificates encode each time (RFC 5280, section 4.1.2.5).
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


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
