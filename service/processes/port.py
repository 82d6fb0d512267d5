"""The port, from before anything is loaded until the service ends: nobody else may have it, front ends may share it.

Where several front ends share a port, the kernel would let in any process of the same user that asks for the same. So
whoever serves on it holds a lock, which ends with its process, however that ends.
"""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import ExitStack
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.settings import NO_PORT

_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)  # where another number helps
_LOCK: Final = "\0runahead/{}/{}"  # a name in Linux's abstract namespace: no file, and one for each network namespace


class PortTakenError(ConfigError):
    """Another process has the port, or only a privileged one may have it: another number helps."""


class Port:
    """host: as it was given. number: of the port; 0 where it is any, and not known before it is listened on; NO_PORT
    where there is none."""

    def __init__(self, host: str, number: int, held: ExitStack) -> None:
        self.host = host
        self.number = number
        self._held = held

    @classmethod
    def reserve(cls, host: str, number: int, *, shared: bool, spelling: Spelling) -> Port:
        """shared: by several front ends, whose sockets then all have SO_REUSEPORT. spelling: what the settings `host`,
        `port` and `frontends` are called. Raises ConfigError."""
        if shared and sys.platform != "linux":
            raise ConfigError(f"{spelling('frontends')} above 1 needs Linux, which shares a port out among processes")
        held = ExitStack()
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)[0]
            if number:
                _lock(held, address)
                with socket.socket(family, kind) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections don't count
                    probe.bind(address)
            if shared:
                # Bound and never listening: it takes no connection, and keeps the number for those that do.
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
            raise ConfigError(f"{spelling('host')} {host!r} is no host name or address") from error
        return cls(host, number, held)

    @property
    def in_words(self) -> int | str:
        """The number, or `off`."""
        return "off" if self.number == NO_PORT else self.number

    def close(self) -> None:
        """Idempotent."""
        self._held.close()


def _lock(held: ExitStack, address: tuple[object, ...]) -> None:
    """Raises OSError if another service has the port."""
    if sys.platform == "linux":
        held.enter_context(socket.socket(socket.AF_UNIX)).bind(_LOCK.format(address[0], address[1]))
