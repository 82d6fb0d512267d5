"""The engine's side of the mask worker, a process that makes the masks of rows with a grammar.

The grammar library never runs in the engine's process. The worker gets requests, rows and tokens over a nonblocking
socket, and answers in shared memory. When it dies or stops handling orders, its requests are lost and it is restarted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.masks import mask_memory as m
from runahead.runtime.masks import worker_messages as o
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.masks.masks import NO_STOPS, GivenUp, MaskFigures, Masks, Stops
from runahead.runtime.masks.worker_watch import Overdue, WorkerErrors
from runahead.runtime.process_end import described
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.parameters import FinishReason

WORKER_MODULE: Final = "runahead.runtime.masks.worker"
# -P: no file in the current directory can replace a module.
COMMAND: Final = (sys.executable, "-P", "-m", WORKER_MODULE)
PROCESSOR_S: Final = 20.0  # of its processor time without a handled order, after which a worker is ended
RUNNING_S: Final = 60.0  # the same of the engine's running time
_LAST_S: Final = 0.1  # from the end of a process's socket to the process's end
_READ_BYTES: Final = 1 << 16
_NS: Final = 1e-9


class MaskWorker(Masks):
    """Starts, uses and restarts the worker. begin: the first order. report: called at each death with a sentence that
    repeats nothing of a request. command: run with two descriptors' numbers appended. processor_s, running_s: limits
    for one order or compilation, of the worker's processor time and of the engine's running time.

    The worker starts with the first request, and is ready when it has read the tokenizer.
    """

    def __init__(
        self,
        begin: o.Begin,
        report: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        processor_s: float = PROCESSOR_S,
        running_s: float = RUNNING_S,
    ) -> None:
        """Make the shared memory. Raises OSError."""
        self._begin = begin
        self._report = report
        self._command = command
        self._most_s = processor_s, running_s
        size = MaskMemory.size(begin.max_rows, begin.vocab_size, begin.drafts)
        self._file = os.memfd_create("runahead-masks")
        # A store to a page without memory would end a process by SIGBUS.
        os.posix_fallocate(self._file, 0, size)
        self.memory = MaskMemory(begin.max_rows, begin.vocab_size, begin.drafts, self._file)
        self._open: set[int] = set()  # requests that the process knows
        self._never: list[GivenUp] = []  # requests that came without a worker, to be reported
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._sent = 0  # orders to all workers so far

    @property
    def pid(self) -> int | None:
        """The worker's process id, if there is one."""
        return None if self._process is None else self._process.pid

    # ------------------------------------------------------------ orders

    def open(self, order: int, grammar: str, stops: Stops = NO_STOPS) -> None:
        if self._process is not None and not self._open and self._lost() is None:
            self._end(self._how_it_ended())  # it ended while idle
        if self._process is None:
            try:
                self._start()
            except OSError as error:
                self._report(f"no mask worker can be started: {error}")
                self._never.append(GivenUp(order, FinishReason.STRUCTURE_LOST))
                return
        self._open.add(order)
        self._send(o.Open(order, grammar, stops))

    def place(self, order: int, slot: int, epoch: int, tokens: NDArray[np.int32]) -> None:
        looked_up = tokens.tobytes() if self._begin.context_length else b""
        self._send(o.Place(order, slot, epoch, tokens.size, looked_up))

    def take(
        self, orders: NDArray[np.int64], tokens: NDArray[np.int32], drafts: int = 0, guesses: int = 0, *,
        soon: bool = False,
    ) -> None:  # fmt: skip
        self._send(o.Take(orders.tobytes(), tokens.tobytes(), drafts, guesses, soon))

    def close(self, order: int) -> None:
        if order in self._open:
            self._open.discard(order)
            self._send(o.Close(order))

    def given_up(self, now: float) -> Sequence[GivenUp]:
        never, self._never = self._never, []
        if self._process is None:
            return never
        self._flush()
        self._pass_on()
        lost = self._lost()
        if lost is None:
            return never + self._end(self._how_it_ended())
        if why := self._overdue(now, self._process.pid):
            return never + self._end(why)
        mine = [answer for answer in lost if answer.order in self._open]
        self._open.difference_update(answer.order for answer in mine)
        return never + [GivenUp(answer.order, FinishReason(answer.reason)) for answer in mine]

    def figures(self) -> MaskFigures:
        done = self.memory.figures.tolist()
        return MaskFigures(
            orders_waiting=self._sent - done[m.HANDLED],
            written=done[m.MASKS],
            written_s=done[m.MASK_NS] * _NS,
            grammars_compiled=done[m.COMPILED],
            grammars_compiled_s=done[m.COMPILE_NS] * _NS,
            grammars_known=done[m.FOUND],
            restarts=max(0, self._starts - 1),
        )

    def stop(self) -> None:
        self._kill()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # ------------------------------------------------------------ the process

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as failed, theirs:
            failed.push(ours)
            descriptors = (theirs.fileno(), self._file)
            self._process = subprocess.Popen(
                [*self._command, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
            )
            assert self._process.stderr is not None
            self._errors = WorkerErrors(self._process.stderr.fileno())
            failed.pop_all()
        self._socket = ours
        self._starts += 1
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._sent = int(self.memory.figures[m.HANDLED])  # orders to all workers so far
        self._orders, self._compiling = Overdue(*self._most_s), Overdue(*self._most_s)
        self._unsent += o.frame(self._begin)
        self._flush()

    def _kill(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._pass_on()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._process = None

    def _how_it_ended(self) -> str:
        """Say how the worker ended: it has closed its socket and is ending."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"it has ended ({described(self._process.wait(_LAST_S))})"
        return "it has ended"

    def _end(self, why: str) -> list[GivenUp]:
        """End the worker and return the requests that it knew. The next request starts another."""
        self._kill()
        lost = sorted(self._open)
        self._open.clear()
        withheld = self._errors.withheld
        aside = f"; {withheld} lines that it wrote are not shown, since they may repeat a request" if withheld else ""
        self._report(f"the mask worker is gone: {why}; {len(lost)} requests with a grammar end with it{aside}")
        return [GivenUp(order, FinishReason.STRUCTURE_LOST) for order in lost]

    def _pass_on(self) -> None:
        """Log the worker's standard error where it repeats nothing of a request."""
        for line in self._errors.lines():
            self._report(f"the mask worker says: {line}")

    def _overdue(self, now: float, pid: int) -> str:
        """Say why the worker must be ended, empty if it need not be."""
        handled, asked, compiled = self.memory.figures[[m.HANDLED, m.ASKED, m.COMPILED]].tolist()
        why = self._orders.why(now, pid, handled != self._sent, handled)
        return why or self._compiling.why(now, pid, asked != compiled, compiled)

    # ------------------------------------------------------------ the socket

    def _send(self, order: o.Order) -> None:
        if self._process is None:
            return  # the next `given_up` reports its lost requests
        self._sent += 1
        self._unsent += o.frame(order)
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; the rest goes with the next order or `given_up`. `_lost` detects an end."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def _lost(self) -> list[o.Lost] | None:
        """Return requests that the worker has given up; None if the worker is gone."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        try:
            answers = [o.read_answer(body) for body in self._reader.feed(data)]
        except (msgspec.MsgspecError, RuntimeError):  # an invalid answer
            return None
        for answer in answers:
            if isinstance(answer, o.Says):
                self._report(f"the mask worker says: {answer.what}")
        return [answer for answer in answers if isinstance(answer, o.Lost)]
