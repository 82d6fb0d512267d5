"""How long a bystander waits for a first token while somebody attacks the port, beside how long it waits in peace.

The bystander makes one call after another. The attacker is a process of its own that does one of the attacks of
`tests/service/hostile/attacks.py` over and over, from another address of this machine. Where cores are few it takes
one of them from the service, whatever it does with it; `busy` is a process that does nothing but that.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from benchmarks.local_service import LocalService, local_service
from tests.service.hostile.attacked import FLAGS, FLAGS_BEHIND_A_PROXY
from tests.service.hostile.attacks import ATTACKS
from tests.service.hostile.bystander import Bystander
from tests.service.hostile.proxy import HAPROXY, proxied

CALLS: Final = 100
PLACE_S: Final = 5.0  # after which no further call is made
BUSY: Final = ["-c", "while True: pass"]


@contextlib.contextmanager
def _attacker(command: list[str]) -> Iterator[None]:
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL) as attacker:
        time.sleep(2.0)  # it has begun
        if attacker.poll() is not None:
            raise RuntimeError(f"the attacker ended by itself: {command}")
        try:
            yield
        finally:
            attacker.kill()


def _waits_ms(bystander: Bystander) -> tuple[list[float], int]:
    """Of each call that ended well, two at least, and how many did not."""
    waits, failed, end = list[float](), 0, time.monotonic() + PLACE_S
    while len(waits) + failed < CALLS and (len(waits) < 2 or time.monotonic() < end):
        try:
            waits += [1e3 * wait_s for wait_s in bystander.first_tokens_s(1)]
        except grpc.RpcError:
            failed += 1
    return waits, failed


def _p99(waits: list[float]) -> float:
    return statistics.quantiles(waits, n=100)[-1]


def main(model: Path) -> None:
    """Print the tables: of the service itself, and behind the proxy where there is one."""
    print(f"up to {CALLS} calls of the bystander, for {PLACE_S:.0f} s; first token, ms")
    with local_service(["--model", str(model), *FLAGS]) as service:
        _table("the service itself", _port(service))
    if HAPROXY is None:
        print("no HAProxy is installed: `make proxy` does it")
        return
    # Without the limits of a caller: behind a proxy all callers without names are one.
    with local_service(["--model", str(model), *FLAGS_BEHIND_A_PROXY]) as service, proxied(_port(service)) as port:
        _table("behind deploy/haproxy", port)


def _table(title: str, port: int) -> None:
    print(f"{title:24} {'quiet p50':>9} {'quiet p99':>9} {'p50':>7} {'p99':>7} {'p99 ÷ quiet p99':>15} {'failed':>6}")
    with Bystander(f"127.0.0.1:{port}") as bystander:
        _waits_ms(bystander)
        commands = {name: ["-m", "tests.service.hostile.attacks", name, str(port)] for name in ATTACKS}
        for name, command in {"busy": BUSY, **commands}.items():
            quiet, _ = _waits_ms(bystander)
            with _attacker(command):
                waits, failed = _waits_ms(bystander)
            print(
                f"{name:24} {statistics.median(quiet):>9.1f} {_p99(quiet):>9.1f} {statistics.median(waits):>7.1f} "
                f"{_p99(waits):>7.1f} {_p99(waits) / _p99(quiet):>15.2f} {failed:>6}",
                flush=True,
            )
            time.sleep(2.0)  # what it has left ends


def _port(service: LocalService) -> int:
    return int(service.url.rpartition(":")[2])
