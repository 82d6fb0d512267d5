"""The ports of a service: its own, and those beside it, which nobody else may have either."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

import structlog

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.processes.port import Port, PortTakenError
from runahead.service.settings.loopback import LOOPBACK
from runahead.service.settings.settings import AUTO_PORT, NO_PORT, FrontEndSettings

FIRST: Final = {"health": 50052, "control": 50053, "metrics": 9464}  # of an unset side port
_STEP: Final = 10  # from one set of side ports to the next
_SETS: Final = 100

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """service: that clients call. health: for probes. control: for who runs the service on this machine. metrics: for
    Prometheus."""

    service: Port
    health: Port
    control: Port
    metrics: Port

    @classmethod
    def reserve(cls, settings: FrontEndSettings, spelling: Spelling) -> Ports:
        """Before anything is loaded. Where an unset side port is taken, all unset side ports move on together, which is
        logged. Raises ConfigError naming the port that somebody has."""
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
    """The first set of ports that are all free. own: those that this service has, on whatever address. Raises
    ConfigError where there is none."""
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
    """Raises ConfigError."""
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
    """Raises ConfigError, which says which side port it is."""
    if number == NO_PORT:
        return Port(host, NO_PORT, ExitStack())
    try:
        return Port.reserve(host, number, shared=False, spelling=lambda setting: spelling(f"{name}_{setting}"))
    except ConfigError as error:
        raise type(error)(f"the {name} port: {error}") from error
