"""Variables that Kubernetes sets for the Services of a namespace change no setting and stop no start."""

from __future__ import annotations

import pytest

from runahead.service import cli
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import SETTINGS, Settings, load_settings


def injected(service: str, address: str, ports: dict[str, int]) -> dict[str, str]:
    """All that a kubelet sets for a Service of that name, as its `getServiceEnvVars` does. ports: by their names."""
    prefix = service.upper().replace("-", "_")
    host = f"[{address}]" if ":" in address else address
    first = next(iter(ports.values()))
    variables = {
        f"{prefix}_SERVICE_HOST": address,
        f"{prefix}_SERVICE_PORT": str(first),
        f"{prefix}_PORT": f"tcp://{host}:{first}",
    }
    for name, port in ports.items():
        begin = f"{prefix}_PORT_{port}_TCP"
        variables |= {
            f"{prefix}_SERVICE_PORT_{name.upper().replace('-', '_')}": str(port),
            begin: f"tcp://{host}:{port}",
            f"{begin}_PROTO": "tcp",
            f"{begin}_PORT": str(port),
            f"{begin}_ADDR": address,
        }
    return variables


OURS = {
    "runahead": {"grpc": 50051, "grpc-tls": 443},
    "runahead-metrics": {"metrics": 9090},
    "runahead-health": {"health": 50052},
}


@pytest.mark.parametrize("address", ["10.96.0.17", "fd00::17"])
def test_services_named_after_us_change_no_setting(address: str) -> None:
    environment = {
        name: value for service, ports in OURS.items() for name, value in injected(service, address, ports).items()
    }
    assert len(environment) == 29
    assert {"RUNAHEAD_PORT", "RUNAHEAD_METRICS_PORT", "RUNAHEAD_HEALTH_PORT"} <= environment.keys()
    assert load_settings({}, environment) == Settings()
    chosen = load_settings({}, {**environment, "RUNAHEAD__PORT": "1001"})
    assert (chosen.front_end.port, chosen.spelling("port")) == (1001, "RUNAHEAD__PORT")


def test_the_server_starts_beside_such_services_and_says_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[ServerConfig] = []

    def run(config: ServerConfig) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("runahead.service.processes.server.run", run)
    for service, ports in OURS.items():
        for name, value in injected(service, "10.96.0.17", ports).items():
            monkeypatch.setenv(name, value)
    assert cli.main(["serve"]) == 0
    assert started[0].front_end.port == SETTINGS["port"].default
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
