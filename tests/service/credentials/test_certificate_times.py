"""When a certificate ends is read as the `cryptography` package reads it."""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509

from runahead.service.credentials.tls import valid_until
from tests.service.certificates import Authority


@pytest.mark.parametrize("days", [-1, 30, 20_000])  # the last one is beyond 2049, in another form
def test_the_end_is_the_certificate_s(days: int) -> None:
    pem = Authority().server("s" * 64, days).certificate
    assert valid_until(pem.decode()) == x509.load_pem_x509_certificate(pem).not_valid_after_utc


def test_of_a_chain_it_is_the_first_end() -> None:
    short, long = (Authority().server(days=days).certificate.decode() for days in (3, 300))
    assert valid_until(short + long) == valid_until("a comment\n" + long + "\n" + short) == valid_until(short)


@pytest.mark.parametrize("wrong", [slice(0, 40), slice(0, 0), slice(10, None)])
def test_what_is_no_certificate_is_refused(wrong: slice) -> None:
    der = ssl.PEM_cert_to_DER_cert(Authority().server().certificate.decode())
    with pytest.raises(ValueError):
        valid_until(ssl.DER_cert_to_PEM_cert(der[wrong]))
    with pytest.raises(ValueError):
        valid_until("no certificate")
