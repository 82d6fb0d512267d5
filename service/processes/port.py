"""Reserves a port from before anything is loaded until the service ends; front ends may share it.

With several front ends on a port, the kernel would admit any process of the same user that asks for sharing. So the
serving process holds a lock that ends with it.
"""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import ExitStack
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.settings import NO_PORT

_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)  # errors that another port number avoids
_LOCK: Final = "\0runahead/{}/{}"  # in Linux's abstract namespace: no file, one for each network namespace


class PortTakenError(ConfigError):
    """Another process has the port, or it is privileged: another number helps."""


class Port:
    """A reserved port. host: as configured. number: 0 for any, unknown before it is listened on; NO_PORT for none."""

    def __init__(self, host: str, number: int, held: ExitStack) -> None:
        self.host = host
        self.number = number
        self._held = held

    @classmethod
    def reserve(cls, host: str, number: int, *, shared: bool, spelling: Spelling) -> Port:
        """Reserve a port. shared: by several front ends, whose sockets then have SO_REUSEPORT. spelling: how the
        settings `host`, `port` and `frontends` are written. Raises ConfigError.
        """
        if shared and sys.platform != "linux":
            raise ConfigError(f"{spelling('frontends')} above 1 needs Linux, which shares a port out among processes")
        held = ExitStack()
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)[0]
            if number:
                _lock(held, address)
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections don't count
                    probe.bind(address)
            if shared:
                # Bound but never listening: it reserves the number and takes no connections.
                holder = held.enter_context(socket.socket(family, kind))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                holder.bind(address)
                if not number:
                    _lock(held, holder.getsockname())
                    number = holder.getsockname()[1]
        except OSError as error:
            held.close()
            sentence = f"{host} port {number} can't be listened on: {error.strerror}"
            if error.errno not in _TAKEN:
                raise ConfigError(sentence) from error
            other = f"{spelling('port')} takes another number, or 0 for any free port"
            raise PortTakenError(f"{sentence}; {other}") from error
        except UnicodeError as error:
            raise ConfigError(f"{spelling('host')} {host!r} is not a host name or address") from error
        return cls(host, number, held)

    @property
    def in_words(self) -> int | str:
        """Return the number, or `off`."""
        return "off" if self.number == NO_PORT else self.number

    def close(self) -> None:
        """Idempotent."""
        self._held.close()


def _lock(held: ExitStack, address: tuple[object, ...]) -> None:
    """Lock the address. Raises OSError if another service has the port."""
    if sys.platform == "linux":
        held.enter_context(socket.socket(socket.AF_UNIX)).bind(_LOCK.format(address[0], address[1]))
