"""The host device: a worker thread that runs launches in order, so that the chain and its hazards exist on a CPU.

The engine's thread stages a plan and continues; the worker reads the staging slot only when the launch *runs*. So a
race on a GPU is a race here too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import NEVER, DeviceCounters, DeviceError, LaunchShape, Program
from runahead.cuda_graphs.rings import RingMemory

# Jitter of the test mode: how long the worker sleeps before S, before apply and before F.
_MAX_DELAY_S = 0.002
_SAMPLED, _TAIL, _ENDED = range(3)  # marks


def no_delay() -> None:
    pass


def seeded_delays(seed: int) -> Callable[[], None]:
    """Return a delay of up to 2 ms, two times in three, from a seed: a test mode that varies the timing of host and
    device."""
    dice = random.Random(seed)

    def delay() -> None:
        if dice.random() < 0.66:
            time.sleep(dice.random() * _MAX_DELAY_S)

    return delay


class HostDevice:
    """Runs a `Program` on a separate thread.

    delay: called before each of a launch's three parts. launched: the number before the first launch's, as in the
    program. clock: ns, monotonic; read before and after each part. marks: int64 [3], the newest launch that is
    sampled, in its tail, ended; None: in this device's memory. late_tail: for tests, only F is a launch's tail.
    """

    def __init__(
        self,
        program: Program,
        rings: RingMemory,
        delay: Callable[[], None] = no_delay,
        *,
        launched: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
        marks: NDArray[np.int64] | None = None,
        late_tail: bool = False,
    ) -> None:
        self.rings = rings
        self.counters = DeviceCounters()
        self.buckets: tuple[int, ...] = ()
        self.mixed_buckets: tuple[int, ...] = ()
        self.calls_at_once = NEVER
        self._program = program
        self._delay = delay
        self._late_tail = late_tail
        self._clock = clock
        self._queue: queue.SimpleQueue[LaunchShape | None] = queue.SimpleQueue()
        self._marks = np.zeros(3, np.int64) if marks is None else marks
        self._marks[:] = launched
        self._awaited = (NEVER, NEVER, NEVER)  # marks beyond these wake the host
        self._fault: BaseException | None = None
        self._mark_read, self._mark_write = os.pipe()
        os.set_blocking(self._mark_read, False)
        os.set_blocking(self._mark_write, False)
        self._thread = threading.Thread(target=self._work, name="host-device", daemon=True)
        self._thread.start()

    def calls(self, shape: LaunchShape) -> int:
        return 1

    def launch(self, shape: LaunchShape) -> None:
        self._queue.put(shape)

    def sampled(self) -> int:
        self._raise_fault()
        return int(self._marks[_SAMPLED])

    def ended(self) -> int:
        self._raise_fault()
        return int(self._marks[_ENDED])

    def in_tail(self) -> int:
        self._raise_fault()
        return int(self._marks[_TAIL])

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        self.counters.waits += 1
        deadline = time.monotonic() + timeout_s
        # Written before the marks are read. The worker reads it after it has set a mark, so that no mark is
        # missed.
        self._awaited = (sampled, in_tail, ended)
        while not self._has_come():
            ready, _, _ = select.select([self._mark_read, *wake_fds], [], [], max(0.0, deadline - time.monotonic()))
            if self._mark_read not in ready:
                break
            os.read(self._mark_read, 4096)
        self._awaited = (NEVER, NEVER, NEVER)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self._program.read_rows()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        os.close(self._mark_read)
        os.close(self._mark_write)

    # ------------------------------------------------------------ the worker

    def _work(self) -> None:
        while (shape := self._queue.get()) is not None:
            try:
                self._run(shape)
            except BaseException as error:
                self._fault = error
                self._mark()
                return

    def _run(self, shape: LaunchShape) -> None:
        slot = self.rings.slot(shape.number)
        self._delay()
        self.rings.start_ns[slot] = self._clock()
        self._program.sample(shape)
        sampled = self._clock()
        if not self._late_tail:
            self._marks[_TAIL] = shape.number
        self._marks[_SAMPLED] = shape.number
        self._mark()
        self._delay()
        applying = self._clock()
        self.counters.bytes_to_device += self._program.apply(shape)
        applied = self._clock()
        if self._late_tail:
            self._marks[_TAIL] = shape.number
            self._mark()
        self._delay()
        forwarding = self._clock()
        self._program.forward(shape)
        self.rings.end_ns[slot] = self._clock()
        self.rings.idle_ns[slot] = applying - sampled + forwarding - applied
        self._marks[_ENDED] = shape.number
        self._mark()

    def _mark(self) -> None:
        """Wake the host if it waits for this mark. Each wake-up costs the worker the interpreter's lock."""
        if self._has_come():
            with contextlib.suppress(BlockingIOError):  # the pipe is already full
                os.write(self._mark_write, b"m")

    def _has_come(self) -> bool:
        """Return whether an awaited mark has come, or the device has failed."""
        marks = self._marks.tolist()
        return self._fault is not None or any(mark > than for mark, than in zip(marks, self._awaited, strict=True))

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise DeviceError(f"a launch failed: {self._fault}") from self._fault
