"""The service's ports: the service port and the side ports, reserved until the service ends.

Front ends may share the service port. The kernel would then admit any process of the same user that asks for sharing,
so the serving process holds a lock that ends with it.
"""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

import structlog

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.loopback import LOOPBACK
from runahead.service.settings.settings import AUTO_PORT, NO_PORT, FrontEndSettings

_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)  # errors that another port number avoids
_LOCK: Final = "\0runahead/{}/{}"  # in Linux's abstract namespace: no file, one for each network namespace

FIRST: Final = {"health": 50052, "control": 50053, "metrics": 9464}  # defaults of unset side ports
_STEP: Final = 10  # between sets of side ports
_SETS: Final = 100

log = structlog.get_logger(__name__)


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


@dataclass(frozen=True, slots=True)
class Ports:
    """Reserved ports. service: clients'. control: operators on this machine. metrics: Prometheus."""

    service: Port
    health: Port
    control: Port
    metrics: Port

    @classmethod
    def reserve(cls, settings: FrontEndSettings, spelling: Spelling) -> Ports:
        """Reserve the ports before anything is loaded. If an unset side port is taken, all unset side ports move
        together, which is logged. Raises ConfigError that names the taken port.
        """
        hosts = {"health": settings.health_host, "control": LOOPBACK, "metrics": settings.metrics_host}
        asked = {name: int(getattr(settings, f"{name}_port")) for name in hosts}
        shared = settings.frontends > 1
        with ExitStack() as held:
            service = Port.reserve(settings.host, settings.port, shared=shared, spelling=spelling)
            held.enter_context(closing(service))
            beside: dict[str, Port] = {}
            for name, number in asked.items():
                if number != AUTO_PORT:
                    beside[name] = held.enter_context(closing(_beside(hosts[name], number, name, spelling)))
            unset = {name: hosts[name] for name in asked if name not in beside}
            own = {service.number, *(port.number for port in beside.values())}
            for name, port in _moved_on(unset, own, spelling).items():
                beside[name] = port
            held.pop_all()
        return cls(service, **beside)

    def close(self) -> None:
        """Idempotent."""
        for port in (self.service, self.health, self.control, self.metrics):
            port.close()


def _moved_on(hosts: dict[str, str], own: set[int], spelling: Spelling) -> dict[str, Port]:
    """Return the first set of free ports. own: ports that this service already has. Raises ConfigError if there is
    none.
    """
    why = ""
    for offset in range(0, _SETS * _STEP, _STEP):
        try:
            found = _set(hosts, offset, own, spelling)
        except PortTakenError as error:
            why = why or str(error).partition(";")[0]
            if offset == (_SETS - 1) * _STEP:
                raise
        else:
            break
    if why:
        log.info("side_ports_moved", why=why, **{f"{name}_port": port.number for name, port in found.items()})
    return found


def _set(hosts: dict[str, str], offset: int, own: set[int], spelling: Spelling) -> dict[str, Port]:
    """Reserve one set. Raises ConfigError."""
    for name in hosts:
        if FIRST[name] + offset in own:
            raise PortTakenError(f"the {name} port: this service has {FIRST[name] + offset} already")
    with ExitStack() as held:
        found = {
            name: held.enter_context(closing(_beside(host, FIRST[name] + offset, name, spelling)))
            for name, host in hosts.items()
        }
        held.pop_all()
    return found


def _beside(host: str, number: int, name: str, spelling: Spelling) -> Port:
    """Reserve a side port. Raises ConfigError that names it."""
    if number == NO_PORT:
        return Port(host, NO_PORT, ExitStack())
    try:
        return Port.reserve(host, number, shared=False, spelling=lambda setting: spelling(f"{name}_{setting}"))
    except ConfigError as error:
        raise type(error)(f"the {name} port: {error}") from error
