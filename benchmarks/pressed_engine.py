"""An engine on the null device with rows that decode, and a front end in the same process that speaks between turns.

The front end's own work is outside what is timed: bytes are in the engine's socket when its turn begins, and are read
from there when it has ended.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.cuda_graphs.simulated_device import SimulatedDevice
from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.loop import Engine
from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.admission_record import largest_record_words
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.scheduler.scheduler import Scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import MAX_STOP_IDS, SamplingParams, StoppingParams
from runahead.runtime.wire.preparation import prepared_submit
from tests.runtime.programs.hash_program import NullProgram

VOCAB: Final = 128_256
CONTEXT: Final = 1 << 17
BLOCK: Final = 16
CHUNK: Final = 128
MAX_PREFILL: Final = 256
MAX_QUEUE: Final = 8192
EOS: Final = 1
PENALISED: Final = 4  # rows with penalties among those that decode
_MAX_TOKENS: Final = 1 << 16  # of rows that decode: more than there are turns
_SOCKET_BYTES: Final = 8 << 20


def _refuse(owner: int, why: str) -> None:
    raise RuntimeError(f"the engine closed the connection of front end {owner}: {why}")


class BusyLinks(SocketLinks):
    """Never waits for an arrival: a turn in which there is nothing to do is as short as any."""

    def wait(self, timeout_s: float) -> None:
        super().wait(0.0)


class FrontEnd:
    """One connection to the engine. Handles and ids count up."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._unsent = bytearray(m.encode_frame(m.Hello(m.PROTOCOL_VERSION)))
        self.submitted = 0

    def id_of(self, handle: int) -> str:
        return f"{self._name}{handle}"

    def tell(self, message: m.ToEngine) -> None:
        """It is in the socket when the next turn begins."""
        self._unsent += m.encode_frame(message)

    def submit(
        self,
        prompt: NDArray[np.int32],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        priority: int = 0,
    ) -> int:
        """Ask for a completion that only its length ends. Returns the handle."""
        self.submitted += 1
        self.tell(
            prepared_submit(
                self.submitted,
                self.id_of(self.submitted),
                prompt,
                sampling or SamplingParams(),
                StoppingParams(max_tokens, ignore_eos=True),
                block_size=BLOCK,
                priority=priority,
            )
        )
        return self.submitted

    def pump(self) -> None:
        """Send what the socket takes, and drop what the engine has said."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(1 << 20):
                pass

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def close(self) -> None:
        self._socket.close()


class PressedEngine:
    """clock: nanoseconds. rows: that decode all the time, some of them with penalties. spare_rows: that nobody has.

    blocks: of the pool.
    """

    def __init__(
        self,
        rows: int,
        clock: Callable[[], int],
        *,
        spare_rows: int = 0,
        blocks: int = 1 << 16,
        penalty_slots: int = PENALISED,
    ) -> None:
        max_rows = rows + spare_rows
        bulk = (1 << 16) + largest_record_words(VOCAB, CONTEXT, CONTEXT // BLOCK)
        rings = allocate_rings(RingLayout(3, PLAN_WORDS, bulk, max_rows, 1))
        limits = SchedulerLimits(
            CONTEXT, VOCAB, (EOS,), CHUNK, MAX_PREFILL, PLAN_WORDS, bulk, penalty_slots=penalty_slots
        )
        ledger: Ledger[Deferred] = Ledger(1, 512)
        scheduler = Scheduler(limits, Rows(max_rows, MAX_STOP_IDS, CONTEXT), BlockPool(blocks, BLOCK), ledger)
        info = m.EngineInfo(
            "null", "none", VOCAB, CONTEXT, (EOS,), -1, max_rows, MAX_QUEUE, blocks, BLOCK, 1, "null", "none", 0,
            penalty_slots, True,
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "engine"
        links = BusyLinks(self._path, lambda: m.Welcome(m.PROTOCOL_VERSION, "bench", info), _refuse)
        device = SimulatedDevice(NullProgram(rings, max_rows=max_rows, token=5), rings)
        self.engine = Engine(device, scheduler, links, max_queue=MAX_QUEUE)
        self._links = links
        self.front_ends: list[FrontEnd] = []
        self.front_end = self.connect("r")
        self._rows = rows
        self._clock = clock
        self.start_rows()

    def start_rows(self) -> None:
        """Rows that decode for as long as anything is measured. Returns when they do."""
        for row in range(self._rows):
            sampling = SamplingParams(frequency_penalty=0.5) if row < PENALISED else None
            self.front_end.submit(np.array([5, 6, 7 + row], np.int32), _MAX_TOKENS, sampling)
        counters = self.engine.scheduler.tally.counters
        enough = counters["generated_tokens"] + 20 * self._rows
        self.turn_until(lambda: counters["generated_tokens"] >= enough)

    def connect(self, name: str) -> FrontEnd:
        """One more front end; names of requests begin with `name`."""
        self.front_ends.append(FrontEnd(self._path, name))
        return self.front_ends[-1]

    def disconnect(self, front_end: FrontEnd) -> None:
        """It is gone, with all of its requests."""
        self.front_ends.remove(front_end)
        front_end.close()

    def turn_us(self) -> float:
        """One turn of the loop. Returns its microseconds."""
        for front_end in self.front_ends:
            front_end.pump()
        begun = self._clock()
        self.engine.turn()
        return (self._clock() - begun) / 1e3

    def turn_until(self, reached: Callable[[], object], limit: int = 100_000) -> None:
        """Turn, untimed, until something is so."""
        for _ in range(limit):
            if reached():
                return
            self.turn_us()
        raise RuntimeError(f"not reached after {limit} turns")

    def waits_for(self, count: int) -> None:
        """Turn, untimed, until so many requests wait, and everything said has arrived."""
        waiting = self.engine.scheduler.waiting
        self.turn_until(lambda: len(waiting) == count and not any(f.has_unsent for f in self.front_ends))

    def request(self, handle: int) -> Request:
        """One of the first front end's live requests."""
        tracked = self.engine.registry.by_id(self.front_end.id_of(handle))
        if tracked is None:
            raise RuntimeError(f"request {handle} is not being served")
        return tracked.request

    def phase_of(self, handle: int) -> str:
        """Of one of the first front end's requests; GONE before it has arrived and after it has ended."""
        if self.engine.registry.by_id(self.front_end.id_of(handle)) is None:
            return "GONE"
        return self.engine.scheduler.phase_of(self.request(handle))

    def ids(self, handles: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.front_end.id_of(handle) for handle in handles)

    def close(self) -> None:
        for front_end in self.front_ends:
            front_end.close()
        self._links.close()
        self._folder.cleanup()
