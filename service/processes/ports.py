"""The ports of a service: its own, and those beside it, which nobody else may have either."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.processes.port import Port
from runahead.service.settings.loopback import LOOPBACK
from runahead.service.settings.settings import FrontEndSettings


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
        """Before anything is loaded. Raises ConfigError naming the port that somebody has."""
        shared = settings.frontends > 1
        with ExitStack() as held:
            service = Port.reserve(settings.host, settings.port, shared=shared, spelling=spelling)
            held.enter_context(closing(service))
            health = _beside(settings.health_host, settings.health_port, "health", spelling)
            held.enter_context(closing(health))
            control = _beside(LOOPBACK, settings.control_port, "control", spelling)
            held.enter_context(closing(control))
            metrics = _beside(settings.metrics_host, settings.metrics_port, "metrics", spelling)
            held.pop_all()
        return cls(service, health, control, metrics)

    def close(self) -> None:
        """Idempotent."""
        for port in (self.service, self.health, self.control, self.metrics):
            port.close()


def _beside(host: str, number: int, name: str, spelling: Spelling) -> Port:
    """Raises ConfigError."""
    try:
        return Port.reserve(host, number, shared=False, spelling=lambda setting: spelling(f"{name}_{setting}"))
    except ConfigError as error:
        raise ConfigError(f"the {name} port: {error}") from error
