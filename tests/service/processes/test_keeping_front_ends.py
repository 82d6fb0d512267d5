"""What the supervisor does when front ends die, or can't be started: with processes that are none."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.engine.pulse import EngineWatch
from runahead.service.processes import children, supervisor
from runahead.service.processes.children import (
    EngineProcess,
    FrontEndOrders,
    FrontEndProcess,
    FrontEndStartError,
    SideOrders,
)
from runahead.service.processes.ports import Port, Ports
from runahead.service.settings.server_config import EXIT_BROKEN, EXIT_OK, ServerConfig
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Resource

TIMEOUT_S = 30.0
GRACE_S = 12.0


class Ending:
    """Something that runs until it ends, or is ended."""

    def __init__(self) -> None:
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self._code.done()

    def has(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)


class FakeEngine(Ending):
    socket = Path("/nowhere")
    device = "cpu"
    pid = -1

    def kill(self) -> None:
        self.has(-9)

    def __init__(self) -> None:
        super().__init__()
        self.graces_s: list[float] = []
        self.was_asked = asyncio.Event()

    def ask_to_stop(self) -> None:
        self.was_asked.set()

    async def stop(self, grace_s: float) -> int:
        self.graces_s.append(grace_s)
        self.has(0)
        return await self.wait()


class FakeWatch:
    def __init__(self) -> None:
        self.stuck = asyncio.Event()

    async def wait_stuck(self) -> None:
        await self.stuck.wait()

    def close(self) -> None:
        pass


class FakeFrontEnd(Ending):
    def __init__(self, world: World, index: int) -> None:
        super().__init__()
        self.index = index
        self.pid = -1
        self.stuck = asyncio.Event()
        self._world = world

    async def serve(self, socket: Path, port: int) -> int:
        if self._world.refuses and self._world.serving:
            self._world.refused += 1
            raise FrontEndStartError(2)
        self._world.serving.append(self)
        self._world.served.set()
        return port or 1234

    async def wait_stuck(self, silent_s: float) -> None:
        await self.stuck.wait()

    def drain(self) -> None:
        self._world.draining.set()
        if not self._world.has_open_streams:
            self.end()

    def end(self) -> None:
        self.has(0)

    async def kill(self) -> None:
        self.has(-9)


class FakeSide(FakeFrontEnd):
    def __init__(self, world: World, orders: SideOrders) -> None:
        super().__init__(world, orders.index)
        self.loaded = b"%d %d" % (orders.health_port or 50, orders.metrics_port or 70)
        self.ports = [orders.health_port, orders.metrics_port]
        self.was_told: list[str] = []

    async def serve(self, socket: Path, port: int) -> int:
        self.ports.append(port)
        self._world.sides.append(self)
        self._world.side_served.set()
        return port or 60

    def drain(self) -> None:
        self.was_told.append("drain")

    def end(self) -> None:
        assert all(front_end.has_ended for front_end in self._world.serving), "probes are answered to the last"
        self.was_told.append("end")
        self.has(0)


class World:
    """Everything that the supervisor starts."""

    def __init__(self, frontends: int, memory: int) -> None:
        settings = FrontEndSettings(frontends=frontends, shutdown_grace_s=GRACE_S)
        self.config = ServerConfig(EngineConfig(model="x"), settings, linger_s=0.0)
        self.board = Board(frontends + 1, memory)
        ports = [Port("127.0.0.1", number, ExitStack()) for number in (1234, 0, 0, 0)]
        self.supervisor = supervisor.Supervisor(self.config, Ports(*ports), memory)
        self.sides: list[FakeSide] = []
        self.side_served = asyncio.Event()
        self.engine, self.watch = FakeEngine(), FakeWatch()
        self.serving: list[FakeFrontEnd] = []
        self.served = asyncio.Event()
        self.refuses = False  # others than those that serve already can't be started
        self.refused = 0
        self.draining = asyncio.Event()
        self.has_open_streams = False  # a drain waits

    async def until_served(self, count: int) -> None:
        while len(self.serving) < count:
            self.served.clear()
            await self.served.wait()


@pytest.fixture(autouse=True)
def nothing_real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no time between two starts."""
    monkeypatch.setattr(children, "BACK_OFF_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(supervisor, "check_checkpoint", checked)
    yield


async def checked(config: EngineConfig, *, has_tokenizer: bool) -> int:
    """The checkpoint's files are as they should be."""
    return 0


def run(body: Any, frontends: int = 1) -> None:
    """Runs `body(world, the supervisor's exit code to come)` with everything started."""

    async def started() -> None:
        with tempfile.TemporaryFile() as memory, pytest.MonkeyPatch.context() as patch:
            memory.truncate(Board.size(frontends + 1))
            world = World(frontends, memory.fileno())

            async def start(orders: FrontEndOrders, *_: object) -> FakeFrontEnd:
                if isinstance(orders, SideOrders):
                    return FakeSide(world, orders)
                return FakeFrontEnd(world, orders.index)

            async def start_engine(*_: object, dropped_lines: tuple[int, int]) -> FakeEngine:
                return world.engine

            async def connect(*_: object) -> FakeWatch:
                return world.watch

            patch.setattr(FrontEndProcess, "start", start)
            patch.setattr(EngineProcess, "start", start_engine)
            patch.setattr(EngineWatch, "connect", connect)
            code = asyncio.create_task(world.supervisor.run())
            async with asyncio.timeout(TIMEOUT_S):
                await world.until_served(frontends)
                await body(world, code)
            await world.supervisor.close()

    asyncio.run(started())


def test_a_front_end_that_can_t_be_started_again_is_given_up_and_a_service_without_any_ends() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        world.refuses = True
        world.serving[0].has(-9)
        assert await code == EXIT_BROKEN
        assert world.refused == len(children.BACK_OFF_S)

    run(body)


def test_one_that_dies_again_and_again_is_given_up_and_the_others_go_on() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        first, second = sorted(world.serving, key=lambda front_end: front_end.index)
        first.has(1)
        for count in range(3, 3 + len(children.BACK_OFF_S)):
            await world.until_served(count)
            world.serving[-1].has(1)
        line = world.board.line(1).held
        line.add(line.number_of("somebody"), {Resource.STREAMS: 5})
        await asyncio.wait(world.supervisor._keepers[:1])
        assert not code.done()
        assert world.serving.count(second) == 1
        assert world.board.total().open_streams == 5
        world.engine.has(1)
        second.has(1)
        assert await code == EXIT_BROKEN

    run(body, frontends=2)


def test_what_a_dead_front_end_had_open_is_open_no_more_at_once() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        line = world.board.line(0)
        line.refused, line.front_ends = 2, 1
        line.held.add(line.held.number_of("somebody"), {Resource.STREAMS: 7})
        assert world.board.total().open_streams == 7
        world.serving[0].has(-9)
        await world.until_served(2)
        total = world.board.total()
        assert (total.open_streams, total.refused, total.front_ends) == (0, 2, 0)
        code.cancel()

    run(body)


def test_a_front_end_that_is_stuck_is_killed_and_started_again() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        world.serving[0].stuck.set()
        assert await world.serving[0].wait() == -9
        await world.until_served(2)
        assert not code.done()
        code.cancel()

    run(body)


def test_an_engine_that_is_stuck_is_killed_and_the_service_ends() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        world.watch.stuck.set()
        assert await world.engine.wait() == -9
        world.serving[0].has(1)
        assert await code == EXIT_BROKEN
        assert len(world.serving) == 1, "a front end that ends with the engine is not started again"

    run(body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_everything_serves_ends_it_in_order(number: signal.Signals) -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        signal.raise_signal(number)
        assert await code == EXIT_OK
        assert await world.serving[0].wait() == 0
        assert world.sides[0].was_told == ["drain", "end"]

    run(body)


def test_hang_ups_of_a_terminal_leave_open_streams_their_grace() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        world.has_open_streams, heard = True, asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
        # The system sends one, a shell another, and a manager of services its first SIGTERM.
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        await heard.wait()
        await world.draining.wait()
        assert not world.supervisor._signals.hurry.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert await code == EXIT_OK

    run(body)


def test_a_hang_up_is_ignored_where_it_was_at_the_start() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        signal.raise_signal(signal.SIGHUP)
        world.serving[0].has(1)
        await world.until_served(2)  # a drain would not start another one
        assert not world.supervisor._signals.stop.is_set()
        code.cancel()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(body)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_engine_ends_while_the_side_server_does_and_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        side = world.sides[0]
        monkeypatch.setattr(side, "end", lambda: None)
        signal.raise_signal(signal.SIGTERM)
        await world.engine.was_asked.wait()
        assert not side.has_ended
        side.has(0)
        assert await code == EXIT_OK

    run(body)


def test_a_side_server_that_dies_is_started_again_on_the_same_ports_and_harms_nobody() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        assert world.sides[0].ports == [0, 0, 0], "any that are free"
        world.board.line(1).stats_watchers = 3
        world.side_served.clear()
        world.sides[0].stuck.set()
        assert await world.sides[0].wait() == -9
        await world.side_served.wait()
        assert world.sides[1].ports == [50, 70, 60]
        assert world.board.total().stats_watchers == 0
        assert not code.done() and len(world.serving) == 1
        code.cancel()

    run(body)


def test_a_service_goes_on_without_a_side_server_that_can_t_be_kept() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        for _ in range(len(children.BACK_OFF_S) + 1):
            world.side_served.clear()
            world.sides[-1].has(1)
            if len(world.sides) <= len(children.BACK_OFF_S):
                await world.side_served.wait()
        assert world.supervisor._side_keeper is not None
        await world.supervisor._side_keeper
        assert not code.done() and len(world.serving) == 1
        code.cancel()

    run(body)


@pytest.mark.parametrize(("passed_s", "least_s", "most_s"), [(4.0, 5.0, 8.0), (9.0, 5.0, 5.0)])
def test_an_engine_has_what_a_drain_has_left_of_the_grace_and_some_seconds_at_least(
    passed_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        loop = asyncio.get_running_loop()
        awake_s = loop.time
        world.has_open_streams = True
        signal.raise_signal(signal.SIGTERM)
        await world.draining.wait()
        monkeypatch.setattr(loop, "time", lambda: awake_s() + passed_s)
        signal.raise_signal(signal.SIGTERM)
        assert await code == EXIT_OK
        await world.supervisor.close()
        assert least_s <= world.engine.graces_s[0] <= most_s

    run(body)


def test_an_engine_of_a_service_that_nobody_told_to_end_has_the_whole_grace() -> None:
    async def body(world: World, code: asyncio.Task[int]) -> None:
        world.refuses = True
        world.serving[0].has(-9)
        assert await code == EXIT_BROKEN
        await world.supervisor.close()
        assert world.engine.graces_s[0] == GRACE_S

    run(body)
