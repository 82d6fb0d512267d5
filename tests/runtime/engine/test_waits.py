"""In a steady decode the engine's thread blocks on launches' marks and on nothing else."""

from __future__ import annotations

import select
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from runahead.cuda_graphs.host_device import HostDevice
from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.loop import Engine
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams
from tests.runtime.chain import nobody_is_refused
from tests.runtime.programs.hash_program import HashProgram

ROWS = 6
LAUNCHES = 100
# Anything in C that can block. `select`, and the selector of the engine's sockets, are looked at with their time-outs.
BLOCKING = {
    "sleep",
    "acquire",
    "wait",
    "join",
    "get",
    "recv",
    "recv_into",
    "accept",
    "connect",
    "sendall",
    "poll",
    "flush",
}
INFO = m.EngineInfo("m", "a", 10, 20, (1,), -1, 2, 3, 4, 16, 2, "cpu", "float32", 5)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    layout = RingLayout(4, PLAN_WORDS, 4096, ROWS, 1)
    rings = allocate_rings(layout)
    program = HashProgram(rings, max_rows=ROWS, num_blocks=400, block_size=16, context_length=1024, vocab_size=97)
    limits = SchedulerLimits(1024, 97, (1,), 32, 64, PLAN_WORDS, 4096)
    ledger: Ledger[Deferred] = Ledger(2, 512)
    scheduler = Scheduler(limits, Rows(ROWS, MAX_STOP_IDS, 1024), BlockPool(400, 16), ledger)
    links = SocketLinks(tmp_path / "engine", m.Welcome(m.PROTOCOL_VERSION, "s", INFO), nobody_is_refused)
    device = HostDevice(program, rings, lambda: time.sleep(0.001))  # slower than the host, which so has to wait
    engine = Engine(device, scheduler, links, max_queue=ROWS)
    yield engine
    engine.device.close()
    links.close()


@pytest.fixture
def front_end(engine: Engine, tmp_path: Path) -> Iterator[None]:
    """A connection that asks for more tokens than the test watches."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(tmp_path / "engine"))
    sock.sendall(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
    for handle in range(1, ROWS + 1):
        prompt = np.array([handle, 3, 4], np.int32).tobytes()
        stopping = StoppingParams(max_tokens=900, ignore_eos=True)
        sock.sendall(m.encode_frame(m.Submit(handle, f"r{handle}", prompt, SamplingParams(seed=handle), stopping)))
    yield
    sock.close()


class CountedSelector:
    """The selector of the engine's sockets, its looks counted by their time-outs."""

    def __init__(self, inner: selectors.DefaultSelector) -> None:
        self.inner = inner
        self.timeouts: Counter[float | None] = Counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.timeouts[timeout] += 1
        return self.inner.select(timeout)


class Watch:
    """A profile hook that writes down every call of something that blocks, and who made it.

    Not of `select`, and not of the `poll` of a selector, which `CountedSelector` looks at.
    """

    def __init__(self) -> None:
        self.blocked: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        name = getattr(called, "__name__", "")
        if frame.f_code is selectors.DefaultSelector.select.__code__:
            return
        if event == "c_call" and name in BLOCKING and not isinstance(getattr(called, "__self__", None), dict):
            self.blocked[f"{name} in {frame.f_code.co_qualname}"] += 1


def test_a_steady_decode_waits_for_marks_and_for_nothing_else(
    engine: Engine, front_end: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    while engine.scheduler.tally.counters["generated_tokens"] < 5 * ROWS:
        engine.turn()
    selects: Counter[tuple[str, bool]] = Counter()
    real_select: Callable[..., object] = select.select

    def counted_select(r: object, w: object, x: object, timeout: float | None = None) -> object:
        caller = sys._getframe(1).f_code
        selects[f"{Path(caller.co_filename).stem}.{caller.co_name}", timeout == 0] += 1
        return real_select(r, w, x, timeout)

    watch, polled = Watch(), CountedSelector(engine._links._selector)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine._links, "_selector", polled)
    monkeypatch.setattr(select, "select", counted_select)
    waits, first = engine.device.counters.waits, engine.ledger.committed
    sys.setprofile(watch)
    try:
        while engine.ledger.committed < first + LAUNCHES:
            engine.turn()
    finally:
        sys.setprofile(None)
    launches = engine.ledger.committed - first
    assert not watch.blocked, f"the host blocked: {watch.blocked}"
    assert set(polled.timeouts) == {0}, "sockets are looked at and not waited for"
    assert {where for where, at_once in selects if not at_once} == {"host_device.wait"}
    assert 0 < engine.device.counters.waits - waits <= launches + 1
    assert engine.figures.overlap_ratio > 0.9


def test_the_watch_of_this_test_sees_a_host_that_blocks() -> None:
    watch = Watch()
    sys.setprofile(watch)
    time.sleep(0)
    sys.setprofile(None)
    assert set(watch.blocked) == {"sleep in test_the_watch_of_this_test_sees_a_host_that_blocks"}
