"""Side ports that nobody has set move on together where one is taken; a port that was set stays, or is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from benchmarks.local_service import logged, started_service
from runahead.runtime.wire.engine_config import ConfigError
from runahead.service.processes import ports
from runahead.service.processes.ports import Ports
from runahead.service.settings.settings import NO_PORT, FrontEndSettings
from runahead.v1 import GenerateRequest, GenerationServiceStub, StoppingOptions

NAMES = ("health", "control", "metrics")


def a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Numbers that stand for 50052, 50053 and 9464, which others on this machine may have."""
    found = {name: a_free_port() for name in NAMES}
    monkeypatch.setattr(ports, "FIRST", found)
    return found


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(number: int) -> socket.socket:
    taken = socket.socket()
    taken.bind(("127.0.0.1", number))
    taken.listen()
    return taken


def reserved(held: ExitStack, **settings: Any) -> dict[str, int]:
    """Numbers of the side ports."""
    found = held.enter_context(closing(Ports.reserve(FrontEndSettings(port=0, **settings), str)))
    return {name: getattr(found, name).number for name in NAMES}


def test_a_port_that_is_free_keeps_its_own_number_and_nothing_is_logged(first: dict[str, int], held: ExitStack) -> None:
    with capture_logs() as events:
        assert reserved(held) == first
    assert not events


@pytest.mark.parametrize("taken", NAMES)
def test_where_one_is_taken_all_that_nobody_set_move_on_by_the_same_step(
    taken: str, first: dict[str, int], held: ExitStack
) -> None:
    held.enter_context(listener(first[taken]))
    with capture_logs() as events:
        found = reserved(held)
    (step,) = {found[name] - first[name] for name in NAMES}
    assert step > 0 and step % 10 == 0
    (moved,) = events
    assert moved["event"] == "side_ports_moved"
    assert (
        moved["why"] == f"the {taken} port: 127.0.0.1 port {first[taken]} can't be listened on: Address already in use"
    )
    assert {name: moved[f"{name}_port"] for name in NAMES} == found


def test_two_services_have_ports_of_their_own_before_either_listens(first: dict[str, int], held: ExitStack) -> None:
    one, other = reserved(held), reserved(held)
    assert one == first
    assert not set(one.values()) & set(other.values())


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_side_ports_move_on_from_the_service_s_own_whatever_its_address(
    host: str, first: dict[str, int], held: ExitStack
) -> None:
    settings = FrontEndSettings(host=host, port=first["health"])
    found = held.enter_context(closing(Ports.reserve(settings, str)))
    assert found.service.number == first["health"]
    assert found.health.number > first["health"]


def test_a_port_that_was_set_stays_where_the_others_move(first: dict[str, int], held: ExitStack) -> None:
    held.enter_context(listener(first["control"]))
    mine = a_free_port()
    found = reserved(held, metrics_port=mine)
    assert found["metrics"] == mine
    assert found["health"] - first["health"] == found["control"] - first["control"] > 0


def test_a_port_that_was_set_and_is_taken_is_refused_by_its_setting(first: dict[str, int], held: ExitStack) -> None:
    taken = a_free_port()
    held.enter_context(listener(taken))
    with pytest.raises(ConfigError, match=f"^the health port: .* port {taken} can't be listened on: .*; health_port"):
        reserved(held, health_port=taken)
    assert reserved(held) == first, "what was reserved before was given back"


def test_side_ports_that_are_all_taken_end_the_start_with_the_last_one(
    first: dict[str, int], held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_SETS", 1)
    held.enter_context(listener(first["metrics"]))
    with pytest.raises(ConfigError, match=r"^the metrics port: .*; metrics_port takes another number"):
        reserved(held)


def test_a_host_that_can_not_be_listened_on_is_no_reason_to_move(first: dict[str, int]) -> None:
    settings = FrontEndSettings(port=0, health_host="192.0.2.1")  # of no machine
    with capture_logs() as events, pytest.raises(ConfigError, match=r"^the health port: 192\.0\.2\.1 port"):
        Ports.reserve(settings, str)
    assert not events


def test_a_port_that_is_off_is_no_port(first: dict[str, int], held: ExitStack) -> None:
    found = reserved(held, health_port=NO_PORT, metrics_port=NO_PORT)
    assert found == {"health": NO_PORT, "control": first["control"], "metrics": NO_PORT}


def test_a_service_without_side_ports_serves_and_listens_on_one_port() -> None:
    off = [word for name in NAMES for word in (f"--{name}-port", "off")]
    with started_service(["--threads", "1", "--num-blocks", "200", *off]) as service:
        (said,) = logged(service.log, "serving")
        assert [said[f"{name}_port"] for name in NAMES] == ["off"] * 3
        with grpc.insecure_channel(service.url) as channel:
            request = GenerateRequest(text="def f():\n", stopping=StoppingOptions(max_tokens=2))
            assert list(GenerationServiceStub(channel).Generate(request, timeout=60))[-1].HasField("finished")
        service.process.terminate()
        assert service.process.wait(60) == 0


def test_two_services_on_one_machine_need_no_setting_but_a_port() -> None:
    auto = [word for name in NAMES for word in (f"--{name}-port", "auto")]
    flags = ["--threads", "1", "--num-blocks", "200", *auto]
    with started_service(flags) as one, started_service(flags) as other:
        assert len({*one.ports.values(), *other.ports.values()}) == 8
        assert logged(other.log, "side_ports_moved")
