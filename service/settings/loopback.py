"""Recognizes loopback addresses."""

from __future__ import annotations

import ipaddress
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. host: a name or an address, an IPv6 address with or without
    brackets.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
