"""The proxy between a router and our replicas: it adds the credential that the router can't send."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.admission import Access
from runahead.service.credentials.callers import CallersFile
from runahead.service.servers.supervised import Security, load_security
from runahead.service.settings.settings import FrontEndSettings, flag_of
from tests.router.hop import CONFIGURATION, Hop, hop
from tests.service.certificates import Authority
from tests.service.fake_engine import TIMEOUT_S, FakeEngine
from tests.service.hostile.proxy import HAPROXY
from tests.service.rpc_errors import code, failure, words
from tests.service.running_service import Service
from tests.service.vllm_calls import bearer, request

TOKEN: Final = "router-token-0123456789"
HOSTS: Final = ("127.0.0.1", "127.0.0.2")
TLS: Final = "check ssl alpn h2 verify required ca-file {} sni str(localhost) verifyhost localhost"

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: `make proxy` does it")


@contextmanager
def replica(folder: Path, host: str, port: int = 0, security: Security | None = None) -> Iterator[Service]:
    folder = folder / host
    folder.mkdir(exist_ok=True)
    path = folder / "engine.sock"
    if security is None:
        (folder / "callers").write_text(f"router generate,control token {TOKEN}\n")
        security = Security(Access(CallersFile(folder / "callers")), None)
    settings = FrontEndSettings(vllm_facade=True)
    with Service(FakeEngine(path), path, settings=settings, security=security, host=host, port=port) as running:
        yield running


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Service]]:
    with ExitStack() as stack:
        first = stack.enter_context(replica(tmp_path, HOSTS[0]))
        yield [first, stack.enter_context(replica(tmp_path, HOSTS[1], first.port))]


@contextmanager
def router_of(hop: Hop, listener: int) -> Iterator[Any]:
    """What a router has of a listener: a channel without a credential."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(f"127.0.0.1:{hop.ports[listener - 1]}", options) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_served(hop: Hop, listener: int) -> bool:
    with router_of(hop, listener) as stub:
        try:
            return bool(stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy)
        except grpc.RpcError as error:
            assert code(error) == grpc.StatusCode.UNAVAILABLE, words(error)
            return False


def served(hop: Hop) -> list[int]:
    """Those that have a replica."""
    return [listener for listener in range(1, len(hop.ports) + 1) if is_served(hop, listener)]


def served_by(hop: Hop, listener: int, replicas: list[Service], metadata: Any = None) -> Service:
    """The replica that gets a completion of a listener."""
    with router_of(hop, listener) as stub:
        call = stub.Generate(request(), timeout=TIMEOUT_S, metadata=metadata)
        until(lambda: any(not each.engine.submitted.empty() for each in replicas))
        (reached,) = (each for each in replicas if not each.engine.submitted.empty())
        submit = reached.engine.next_submit()
        assert submit.request_id == "router/r-1"
        reached.engine.output(submit.handle, [5], FinishReason.LENGTH)
        assert list(call)[-1].complete.finish_reason == "length"
    return reached


def test_the_configuration_is_one_that_the_proxy_takes_and_listens_on_loopback_alone() -> None:
    assert HAPROXY is not None
    command = [HAPROXY, "-c", "-dW", "-f", str(CONFIGURATION)]
    done = subprocess.run(command, env={**os.environ, "RUNAHEAD_TOKEN": TOKEN}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.returncode and "RUNAHEAD_TOKEN is missing" in without.stderr
    text = CONFIGURATION.read_text()
    variables = re.findall(r"^ *bind \"\$\{(\w+)\}\"", text, re.MULTILINE)
    assert len(variables) == text.count("    bind ")
    for name in variables:
        assert re.search(rf'presetenv {name} "127\.0\.0\.1:', text)


def test_each_listener_has_a_replica_that_knows_the_caller(tmp_path: Path, replicas: list[Service]) -> None:
    with hop(tmp_path, HOSTS, replicas[0].port, TOKEN) as proxy:
        until(lambda: served(proxy) == [1, 2])
        assert {served_by(proxy, listener, replicas).host for listener in (1, 2)} == set(HOSTS)
        again = served_by(proxy, 1, replicas, bearer("somebody-elses-0123456789"))
        assert again.host == served_by(proxy, 1, replicas).host, (
            "a listener stays its replica's, whatever the caller sends"
        )
    assert TOKEN not in proxy.log.read_text()


def test_a_listener_without_a_replica_is_unavailable_and_gets_the_next_one(
    tmp_path: Path, replicas: list[Service]
) -> None:
    with hop(tmp_path, HOSTS[:1], replicas[0].port, TOKEN) as proxy:
        until(lambda: served(proxy) == [1])
        with router_of(proxy, 2) as stub:
            error = failure(lambda: stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S))
        assert (code(error), words(error)) == (grpc.StatusCode.UNAVAILABLE, "no replica is behind this listener")
        proxy.names.addresses.append(HOSTS[1])
        until(lambda: served(proxy) == [1, 2])
        assert served_by(proxy, 1, replicas).host == HOSTS[0]
        proxy.names.addresses.remove(HOSTS[0])
        until(lambda: served(proxy) == [2])
        assert served_by(proxy, 2, replicas).host == HOSTS[1]


def test_a_replica_that_is_gone_leaves_its_listener_alone_empty(tmp_path: Path, replicas: list[Service]) -> None:
    first = replicas[0]
    with ExitStack() as stack:
        other = stack.enter_context(replica(tmp_path, "127.0.0.3", first.port))
        with hop(tmp_path, (HOSTS[0], "127.0.0.3"), first.port, TOKEN) as proxy:
            until(lambda: served(proxy) == [1, 2])
            gone = next(listener for listener in (1, 2) if served_by(proxy, listener, [first, other]) is other)
            stack.close()
            until(lambda: served(proxy) == [3 - gone])
            assert served_by(proxy, 3 - gone, [first]) is first


@pytest.mark.parametrize("is_known", [True, False])
def test_with_the_options_of_tls_a_replica_is_reached_through_tls_and_known_by_its_name(
    tmp_path: Path, is_known: bool
) -> None:
    authority, other = Authority(), Authority("other")
    certificate, key = authority.server().write(tmp_path, "server")
    (tmp_path / "callers").write_text(f"router generate,control token {TOKEN}\n")
    (tmp_path / "ca.crt").write_bytes((authority if is_known else other).pem)
    settings = FrontEndSettings(callers=str(tmp_path / "callers"), tls_cert=str(certificate), tls_key=str(key))
    security = load_security(settings, flag_of)
    with (
        replica(tmp_path, HOSTS[0], security=security) as only,
        hop(tmp_path, HOSTS[:1], only.port, TOKEN, TLS.format(tmp_path / "ca.crt")) as proxy,
    ):
        if is_known:
            until(lambda: served(proxy) == [1])
            assert served_by(proxy, 1, [only]) is only
        else:
            until(lambda: "SSL handshake failure" in proxy.log.read_text())
            assert served(proxy) == []
