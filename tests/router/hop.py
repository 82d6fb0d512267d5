"""The proxy of deploy/k8s/components/router beside a router, with a name server that says where replicas are."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.deploy.rendering import K8S
from tests.service.fake_engine import TIMEOUT_S
from tests.service.hostile.proxy import HAPROXY

CONFIGURATION: Final = K8S / "components" / "router" / "haproxy.cfg"
LISTENERS: Final = 4
_NAME: Final = "runahead-pods.runahead.svc.cluster.local"
_RESOLVERS: Final = "    parse-resolv-conf\n"


class NameServer:
    """Answers every question for addresses of IPv4 with `addresses`, and every other one with none."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))  # wakes the thread
        self._thread.join(TIMEOUT_S)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            asked, client = self._socket.recvfrom(1024)
            if not asked:
                return
            self._socket.sendto(self._answer(asked), client)

    def _answer(self, asked: bytes) -> bytes:
        end = asked.index(0, 12) + 5  # of the one question: a name, its type and its class
        (kind,) = struct.unpack("!H", asked[end - 4 : end - 2])
        found = [socket.inet_aton(address) for address in self.addresses] if kind == 1 else []
        header = asked[:2] + struct.pack("!5H", 0x8580, 1, len(found), 0, 0)
        records = (struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + address for address in found)
        return header + asked[12:end] + b"".join(records)


@dataclass(frozen=True, slots=True)
class Hop:
    """ports: of the listeners, on 127.0.0.1. names: says where replicas are. log: the proxy's."""

    ports: Sequence[int]
    names: NameServer
    log: Path


@contextmanager
def hop(folder: Path, addresses: Sequence[str], port: int, token: str, options: str = "check") -> Iterator[Hop]:
    """A proxy in front of replicas. port: of each of them. options: RUNAHEAD_REPLICA_OPTIONS."""
    assert HAPROXY is not None
    written = CONFIGURATION.read_text(encoding="utf-8")
    assert _RESOLVERS in written
    with ExitStack() as stack:
        names = NameServer(addresses)
        stack.callback(names.close)
        configuration, log = folder / "haproxy.cfg", folder / "haproxy.log"
        configuration.write_text(written.replace(_RESOLVERS, f"    nameserver here 127.0.0.1:{names.port}\n"))
        ports = _free_ports(LISTENERS)
        environment = {
            **os.environ,
            **{f"RUNAHEAD_LISTEN_{listener}": f"127.0.0.1:{each}" for listener, each in enumerate(ports, 1)},
            "RUNAHEAD_REPLICAS": f"{_NAME}:{port}",
            "RUNAHEAD_REPLICA_OPTIONS": options,
            "RUNAHEAD_TOKEN": token,
        }
        output = stack.enter_context(log.open("wb"))
        command = [HAPROXY, "-db", "-f", str(configuration)]
        process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        stack.callback(process.terminate)
        _wait_until_it_listens(process, ports, log)
        yield Hop(ports, names, log)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_until_it_listens(process: subprocess.Popen[bytes], ports: Sequence[int], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    for port in ports:
        while True:
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the proxy does not listen"
            time.sleep(0.02)
