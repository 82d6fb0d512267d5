"""What all faults of a soak share: the service, who calls it, what has happened, and what was wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.load.calls import Call, reason_of
from runahead.v1 import GenerateRequest, GenerationServiceStub, SamplingOptions, StoppingOptions

# Each has separate limits, so that one caller's load does not affect another.
CALLERS = {
    "canary": "generate",
    "steady": "generate",
    "noise": "generate",
    "rude": "generate",
    "aborter": "generate",
    "ops": "control",
}
# How a channel comes back after its front end was killed.
RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
# The deadline of calls that are to end well. On a busy machine one takes minutes: its caller has some 90 in the queue,
# rows are evicted, and all processes stand still for 20 s now and then. A call without an end is lost all the same.
PATIENCE_S = 600.0
EXCUSED_S = 5.0  # after a front end was killed, calls may find that it is gone
HEARD_AGAIN_S = 1.0  # after the engine continues, a front end may not have its heartbeat yet


@dataclass(slots=True)
class World:
    """The state that a soak's tasks share. tokens: of each caller. counts: of events, by name. killed_s: when front
    ends were killed. standstills_s: from when until when processes were stopped. engine_stops_s: stops of the engine
    alone, in which front ends refuse calls. machine: held while processes are killed or stopped. slowest_s: of the
    calls that ended as they should.
    """

    seed: int
    url: str = ""
    tokens: dict[str, str] = field(default_factory=lambda: {name: secrets.token_hex(16) for name in CALLERS})
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    standstills_s: list[tuple[float, float]] = field(default_factory=list)
    engine_stops_s: list[tuple[float, float]] = field(default_factory=list)
    slowest_s: float = 0.0
    machine: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    channels: list[grpc.aio.Channel] = field(default_factory=list)
    _names: Iterator[int] = field(default_factory=itertools.count)
    _counting: threading.Lock = field(default_factory=threading.Lock)  # some faults run in other threads

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def callers_file(self) -> str:
        return "".join(f"{name} {rights} token {self.tokens[name]}\n" for name, rights in CALLERS.items())

    def connect(self) -> tuple[grpc.aio.Channel, GenerationServiceStub]:
        """Make a channel with a separate connection, which is closed at the end."""
        channel = grpc.aio.insecure_channel(self.url, [("runahead.channel", len(self.channels)), *RECONNECT])
        self.channels.append(channel)
        return channel, GenerationServiceStub(channel)

    def metadata(self, caller: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[caller]}"),)

    def new_id(self) -> str:
        return f"soak-{next(self._names)}"

    def draws(self, name: str) -> random.Random:
        """Return the random numbers of one fault, derived from the seed."""
        return random.Random(f"{self.seed} {name}")

    def happened(self, name: str, times: int = 1) -> None:
        with self._counting:
            self.counts[name] += times

    def excuse(self, code: grpc.StatusCode, reason: str, began_s: float) -> str:
        """The name that an excused failure is counted by; empty where it is wrong. A call may end UNAVAILABLE if its
        front end was killed, or if the front end refuses it with ENGINE_SILENT while the engine alone is stopped.

        reason: of ErrorInfo. began_s: when the call began.
        """
        if code != grpc.StatusCode.UNAVAILABLE:
            return ""
        if reason == "ENGINE_SILENT":
            met = any(first <= now_s() and began_s <= last + HEARD_AGAIN_S for first, last in self.engine_stops_s)
            return "calls refused while the engine was stopped" if met else ""
        was_killed = any(killed_s >= began_s - EXCUSED_S for killed_s in self.killed_s)
        return "calls that ended with their front end" if was_killed else ""

    def judge(self, name: str, call: Call, expected: tuple[int, ...]) -> bool:
        """Whether a completion has ended well; what is wrong with it is kept. An excused call has ended, but not
        well."""
        wrong = call.wrong(expected)
        self.slowest_s = max(self.slowest_s, 0.0 if wrong else call.ended_s - call.began_s)
        if wrong and not call.fault and (excused := self.excuse(call.code, call.reason, call.began_s)):
            self.happened(excused)
            return False
        if wrong:
            self.wrong.append(f"{name}: {wrong}")
        return not wrong and call.is_finished

    def expect(self, name: str, began_s: float, error: grpc.RpcError | None, codes: Sequence[grpc.StatusCode]) -> None:
        """Counts a fault where it ended with one of these codes; any other code is wrong. error: None is OK."""
        code = grpc.StatusCode.OK if error is None else error.code()
        reason = "" if error is None else reason_of(error)
        if code in codes:
            self.happened(name)
            self.slowest_s = max(self.slowest_s, now_s() - began_s)
        elif excused := self.excuse(code, reason, began_s):
            self.happened(excused)
        elif reason.endswith("_LIMIT"):
            self.happened("refused for want of room")
        else:
            words = "" if error is None else f": {error.details()}"
            wanted = " or ".join(code.name for code in codes)
            self.wrong.append(f"{name}: ended with {code.name}{words}, and not with {wanted}")

    async def pause(self, seconds: float) -> bool:
        """Waits, and returns at once when the soak has ended. Whether it goes on."""
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            return True
        return False


def completion(max_tokens: int, seed: int = 1, *, lines: int = 0, salt: str = "") -> GenerateRequest:
    """A request of so many tokens, its prompt as long as so many lines. With a salt of its own none of the prompt is
    found in the prefix cache."""
    text = "".join(f"value_{number} = {number}\n" for number in range(lines)) + "def f(x):\n"
    return GenerateRequest(
        text=text,
        cache_salt=salt,
        sampling=SamplingOptions(temperature=0.8, seed=seed),
        stopping=StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
    )


def now_s() -> float:
    return time.monotonic()
