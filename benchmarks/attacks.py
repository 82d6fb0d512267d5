"""How long a bystander waits for a first token while somebody attacks the port, beside how long it waits in peace.

The bystander makes one call after another. The attacker is a process of its own that does one of the attacks of
`tests/service/hostile/attacks.py` over and over, from another address of this machine, from one connection at a time
and from several where the attack has several. Where cores are few it takes one of them from the service, whatever it
does with it; `busy` is a process that does nothing but that.

    python -m benchmarks.attacks --attack rapid_reset --flags="--max-connection-streams 100"
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from benchmarks.local_service import local_service
from tests.service.hostile.attacked import FLAGS, FLAGS_BEHIND_A_PROXY
from tests.service.hostile.attacks import ATTACKS
from tests.service.hostile.bystander import Bystander
from tests.service.hostile.proxy import HAPROXY, proxied

CALLS: Final = 100
PLACE_S: Final = 5.0  # after which no further call is made
BUSY: Final = "busy"
_BUSY_CODE: Final = "while True: pass"
_PEACE_CALLS: Final = 10  # in a row, each as fast as the slowest in a hundred before the first attack
_PEACE_S: Final = 60.0


@dataclass(frozen=True)
class Waits:
    """Of a bystander's calls. ms: for its first token, of each call that ended well. failed: how many did not."""

    ms: Sequence[float]
    failed: int

    @property
    def p50(self) -> float:
        return statistics.median(self.ms) if self.ms else float("nan")

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.ms, n=100)[-1] if len(self.ms) > 1 else self.p50


def main(model: Path, chosen: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
    """Print the tables: of the service itself, and behind the proxy where there is one.

    chosen: names of attacks, and `busy`; all of them by default. flags: of the service, besides those of the tests.
    """
    commands = {name: command for name, command in _commands().items() if name.split(" ")[0] in (chosen or _names())}
    print(f"up to {CALLS} calls of the bystander, for {PLACE_S:.0f} s; first token, ms; load average {_load()}")
    with local_service(["--model", str(model), *FLAGS, *flags]) as service:
        _table("the service itself", service.ports["service"], commands)
    if HAPROXY is None:
        print("no HAProxy is installed: `make proxy` does it")
        return
    # Without the limits of a caller: behind a proxy all callers without names are one.
    with (
        local_service(["--model", str(model), *FLAGS_BEHIND_A_PROXY, *flags]) as service,
        proxied(service.ports["service"]) as port,
    ):
        _table("behind deploy/haproxy", port, commands)
    print(f"load average {_load()}")


def _names() -> list[str]:
    return [BUSY, *ATTACKS]


def _commands() -> dict[str, list[str]]:
    """What the attacker runs, but for the port, by what the table calls it."""
    commands = {BUSY: ["-c", _BUSY_CODE]}
    for name, attack in ATTACKS.items():
        for connections in sorted({1, attack.connections}):
            title = name if connections == 1 else f"{name} x {connections}"
            commands[title] = ["-m", "tests.service.hostile.attacks", name, "PORT", str(connections)]
    return commands


def _table(title: str, port: int, commands: Mapping[str, list[str]]) -> None:
    print(
        f"{title:27} {'quiet p50':>9} {'quiet p99':>9} {'p50':>7} {'p99':>7} {'p99 ÷ quiet p99':>15} {'failed':>6} "
        f"{'peace after':>11}"
    )
    with Bystander(f"127.0.0.1:{port}") as bystander:
        _waits(bystander)
        peace = _waits(bystander)
        for name, command in commands.items():
            quiet = _waits(bystander)
            with _attacker([word.replace("PORT", str(port)) for word in command]):
                waits = _waits(bystander)
            after_s = _wait_for_peace(bystander, max(peace.ms))
            print(
                f"{name:27} {quiet.p50:>9.1f} {quiet.p99:>9.1f} {waits.p50:>7.1f} {waits.p99:>7.1f} "
                f"{waits.p99 / quiet.p99:>15.2f} {waits.failed:>6} {after_s:>9.1f} s",
                flush=True,
            )


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


def _waits(bystander: Bystander, calls: int = CALLS) -> Waits:
    """Two calls at least."""
    waits, failed, end = list[float](), 0, time.monotonic() + PLACE_S
    while len(waits) + failed < calls and (len(waits) + failed < 2 or time.monotonic() < end):
        try:
            waits += [1e3 * wait_s for wait_s in bystander.first_tokens_s(1)]
        except grpc.RpcError:
            failed += 1
    return Waits(waits, failed)


def _wait_for_peace(bystander: Bystander, slowest_ms: float) -> float:
    """Returns after how many seconds calls are as fast as in peace: what the attack has left is gone then.

    Raises RuntimeError where they do not become so.
    """
    begun, seen, peaceful = time.monotonic(), time.monotonic(), 0
    while peaceful < _PEACE_CALLS:
        waits = _waits(bystander, 1)
        now = time.monotonic()
        if waits.failed or max(waits.ms) > 2 * slowest_ms:
            seen, peaceful = now, 0
        else:
            peaceful += 1
        if now - begun > _PEACE_S:
            raise RuntimeError(f"{_PEACE_S:.0f} s after an attack a bystander still waits for longer than before")
    return seen - begun


def _load() -> str:
    return ", ".join(f"{load:.2f}" for load in os.getloadavg())


if __name__ == "__main__":
    # The bundled model is found by the other benchmarks, which need more than this one does.
    from benchmarks.bench import BUNDLED

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", action="append", choices=_names(), default=[], help="one to be tried; all of them")
    parser.add_argument("--flags", default="", help="of the service, in one string")
    asked = parser.parse_args()
    main(BUNDLED, asked.attack, asked.flags.split())
