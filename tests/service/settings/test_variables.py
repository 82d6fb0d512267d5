"""Variables that Kubernetes sets for the Services of a namespace change no setting and stop no start."""

from __future__ import annotations

import pytest

from runahead.service import cli
from runahead.service.settings.server_config import ServerConfig
from runahead.service.settings.settings import SETTINGS, Settings, SettingsError, load_settings
from runahead.service.settings.variables import is_injected, old_variable_of, variable_of


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
    assert all(is_injected(name, value) for name, value in environment.items())
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


@pytest.mark.parametrize("service", ["runahead--", "runahead--port", "runahead--health", "runahead--x--y"])
def test_a_service_with_two_dashes_in_its_name_changes_no_setting_either(service: str) -> None:
    environment = injected(f"{service}1", "10.96.0.17", {"grpc": 50051})
    assert all(name.startswith("RUNAHEAD__") for name in environment)
    assert load_settings({}, environment) == Settings()


@pytest.mark.parametrize("name", ["config", *SETTINGS])
def test_a_variable_under_its_old_name_gets_a_sentence_with_the_new_one(name: str) -> None:
    old, new = old_variable_of(name), variable_of(name)
    for value in ("1", "", "tcp", "http://10.0.0.1:1"):
        with pytest.raises(SettingsError, match=rf"{old} is not read any more; set {new}, with two .* unset {old}$"):
            load_settings({}, {old: value})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RUNAHEAD__PORT", "tcp://10.0.0.1:50051"),  # of a Service whose name ends with a dash, which none may
        ("RUNAHEAD__METRICS_SERVICE_HOST", "metrics.example"),
        ("RUNAHEAD__METRICS_SERVICE_PORT", "grpc"),
        ("RUNAHEAD__METRICS_PORT_9090_TCP_PROTO", "http"),
    ],
)
def test_what_only_looks_like_a_variable_of_a_service_is_refused(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        load_settings({}, {variable: value})


def test_names_of_other_programs_that_begin_as_the_old_ones_did_are_nobodys_business() -> None:
    assert load_settings({}, {"RUNAHEAD_DEPTH": "3", "RUNAHEAD_SERVICE_ACCOUNT": "me"}) == Settings()
