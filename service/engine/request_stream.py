"""A request's tokens on their way from the engine's connection to one reader."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from runahead.runtime.wire.frames import ProtocolError
from runahead.runtime.wire.messages import Admitted, Finished, Logprobs, PromptLogprobs

READERS_A_TURN: Final = 4

T = TypeVar("T")

_TOKEN_BYTES: Final = 48  # approximate memory of a buffered token and of a buffered top entry
_TOP_BYTES: Final = 32
_ENTRY_BYTES: Final = 4  # of a column of prompt log-probabilities


class Waking:
    """Wakes readers in order of arrival, `READERS_A_TURN` in each turn of the running event loop.

    The loop runs everything ready before it polls sockets, and a woken reader takes tens of microseconds to send its
    tokens: a launch of 64 rows would take one turn of 5 to 10 ms. Everything else waits for that turn, and a new call
    needs several turns. Small slices keep turns short and the order fair.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[Callable[[], None]] = deque()
        self._is_running = False

    def add(self, wake: Callable[[], None]) -> None:
        """Call `wake` after all those added before, in this turn of the loop or a later one."""
        self._due.append(wake)
        if not self._is_running:
            self._is_running = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        due = self._due
        for _ in range(min(READERS_A_TURN, len(due))):
            due.popleft()()
        self._is_running = bool(due)
        if due:
            self._loop.call_soon(self._next)


class RequestRefusedError(Exception):
    """The engine refused to queue the request."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class EngineLostError(Exception):
    """The engine has stopped, its connection is lost, or it does not answer. The message may be shown to a client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def again(self) -> EngineLostError:
        """Return a new exception with the same message, for another waiter."""
        return EngineLostError(self.reason, self.message)


class SlowReaderError(Exception):
    """The reader left more than its bound unread."""


class StalledReaderError(Exception):
    """The reader read nothing for too long. after_s: seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class TokenBatch(msgspec.Struct, frozen=True):
    """All waiting tokens in order, and the end if it has come; nothing follows an end.

    logprobs: of each token, if requested. admitted: sent when the request got its row, in this batch or before; set
    with any token.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    finished: Finished | None
    admitted: Admitted | None


class RequestStream:
    """A bounded buffer with one reader on one event loop. It ends once: finished, refused or failed.

    The reader wakes once and takes all tokens that have arrived. Log-probabilities of the prompt come first and are
    taken one message, a launch's worth, at a time.

    unread_bytes: bound of buffered tokens, estimated.
    unread_prompt_bytes: bound of the buffered prompt in the engine's columns; one message always has room.
    schedule_wake: schedules a wake-up when new tokens arrive (`Waking`); None wakes at once.
    submitted_at: the origin of all times here and in the engine, monotonic seconds: when the request is submitted, or
        announced before.
    first: the stream of completion 0 if this is another completion's; None for completion 0 itself. Streams of one
        request share a reader and a bound, and fail together. The first one gets messages about the request and its
        prompt.
    """

    def __init__(
        self,
        handle: int,
        unread_bytes: int,
        unread_prompt_bytes: int = 0,
        schedule_wake: Callable[[Callable[[], None]], None] | None = None,
        first: RequestStream | None = None,
    ) -> None:
        self.handle = handle
        self.submitted_at = time.monotonic()
        self._unread_limit = unread_bytes
        self._unread = 0
        self._unread_prompt_limit = unread_prompt_bytes
        self._unread_prompt = 0
        self._prompt_parts: deque[PromptLogprobs] = deque()
        self._prompt_next = 1  # index of the next part's first prompt token; the first token has no log-probability
        self._prompt_end = 1  # see `expect_prompt`
        self._admitted: Admitted | None = None
        self._interrupt: Callable[[], object] | None = None
        self._when_admitted: Callable[[], object] | None = None
        self._preparation: asyncio.Future[Any] | None = None  # the reader's work until it submits
        self._accepted = False
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs | None] = []
        self._finished: Finished | None = None
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._schedule_wake = schedule_wake
        self._wake_scheduled = False
        self._first = first or self
        # all of the request, by index
        self.completions: list[RequestStream] = [] if first is None else first.completions
        self.completions.append(self)
        self._untaken = 0  # this stream's part of the first one's `_unread`

    @property
    def failure(self) -> Exception | None:
        """Why the request's streams failed or were refused, None if they did not."""
        return next((one._failure for one in self.completions if one._failure is not None), None)

    @property
    def unread_bytes(self) -> int:
        """The reader's unread bytes, estimated."""
        return self._unread + self._unread_prompt

    @property
    def admitted(self) -> Admitted | None:
        """The admission, None before the request has a row."""
        return self._admitted

    @property
    def finished(self) -> Finished | None:
        """The engine's end of the completion, None before it."""
        return self._finished

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._finished is not None or self._failure is not None

    @property
    def has_more(self) -> bool:
        """Whether `take` returns without waiting."""
        return bool(self._token_ids) or self.ended

    # ------------------------------------------------------------ the reader's side

    async def accepted(self) -> None:
        """Wait until the engine has queued the request. Raises RequestRefusedError or EngineLostError."""
        while not self._accepted and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure

    async def unless_ended(self, preparation: Coroutine[object, object, T]) -> T | None:
        """Run `preparation` for an announced request and return its result, or cancel it and return None if the stream
        ends first. Raises its errors.
        """
        task: asyncio.Future[T] = asyncio.ensure_future(preparation)
        # nothing may be waiting for it any more
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._preparation = task
        try:
            await asyncio.wait({task})
            return None if self.ended else task.result()
        finally:
            self._preparation = None
            task.cancel()

    def expect_prompt(self, prompt_logprobs: int) -> None:
        """Set how many prompt tokens the engine will describe."""
        self._prompt_end = 1 + prompt_logprobs

    def interrupt_with(self, interrupt: Callable[[], object]) -> None:
        """Call this once if the stream fails while its reader is writing."""
        self._interrupt = interrupt

    def tell_of_admission(self, tell: Callable[[], object]) -> None:
        """Call this once when the completion gets a row."""
        self._when_admitted = tell

    async def take_prompt(self) -> PromptLogprobs | None:
        """Take the next part of the prompt's log-probabilities; None if all were taken or the request has ended. Raises
        EngineLostError or SlowReaderError.
        """
        while not self._prompt_parts and self._prompt_next < self._prompt_end and not self.ended:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        if not self._prompt_parts:
            return None
        part = self._prompt_parts.popleft()
        self._unread_prompt -= _column_bytes(part)
        return part

    async def take(self) -> TokenBatch:
        """Take at least one token, or the end. Raises EngineLostError or SlowReaderError."""
        while not self._token_ids and not self.ended:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        self._first._unread -= self._untaken
        self._untaken = 0
        return TokenBatch(token_ids, logprobs, self._finished, self._admitted)

    async def wait(self) -> None:
        """Wait for the next message about the request."""
        await self._wait()

    def _wait(self) -> asyncio.Future[None]:
        reader = self._first._reader = asyncio.get_running_loop().create_future()
        return reader

    # ------------------------------------------------------------ the connection's side

    def accept(self) -> None:
        """Record that the engine has queued the request."""
        self._accepted = True
        self._wake()

    def admit(self, admitted: Admitted) -> None:
        """Record that the request got a row."""
        self._admitted = admitted
        tell, self._when_admitted = self._when_admitted, None
        if tell is not None:
            tell()

    def push_prompt(self, part: PromptLogprobs) -> bool:
        """Buffer log-probabilities of the prompt. Returns False, and fails the stream, without room.

        Raises ProtocolError for a part out of order or inconsistent columns.
        """
        count = len(part.chosen) // _ENTRY_BYTES
        if part.offset != self._prompt_next or not 0 < count <= self._prompt_end - self._prompt_next:
            raise ProtocolError(
                f"log-probabilities of {count} prompt tokens from {part.offset} on, where tokens "
                f"{self._prompt_next} to {self._prompt_end - 1} were missing"
            )
        if len(part.chosen) % _ENTRY_BYTES or len(part.top_ids) % len(part.chosen):
            raise ProtocolError(f"{len(part.top_ids)} bytes of top ids for {len(part.chosen)} of prompt tokens")
        if len(part.top_ids) != len(part.top_logprobs):
            raise ProtocolError(f"{len(part.top_ids)} bytes of top ids and {len(part.top_logprobs)} of their values")
        self._prompt_next += count
        self._unread_prompt += _column_bytes(part)
        if self._prompt_parts and self._unread_prompt > self._unread_prompt_limit:
            self.fail(SlowReaderError())
            return False
        self._prompt_parts.append(part)
        self._wake()
        return True

    def push(self, token_id: int, logprobs: Logprobs | None) -> bool:
        """Buffer a token. Returns False, and fails the stream, without room.

        Raises ProtocolError if the prompt's log-probabilities are incomplete.
        """
        if self._prompt_next < self._prompt_end:
            raise ProtocolError(f"a token came before the log-probability of prompt token {self._prompt_next}")
        size, first = _TOKEN_BYTES, self._first
        if logprobs is not None:
            size += _TOP_BYTES * len(logprobs.top_ids)
        first._unread += size
        if first._unread > self._unread_limit:
            self.fail(SlowReaderError())
            return False
        self._untaken += size
        self._token_ids.append(token_id)
        self._logprobs.append(logprobs)
        if self._schedule_wake is None:
            self._wake()
        elif first._reader is not None and not first._wake_scheduled:
            first._wake_scheduled = True
            self._schedule_wake(first._wake_as_scheduled)
        return True

    def finish(self, finished: Finished) -> None:
        """Record the end, as the engine sent it."""
        if not self.ended:
            self._finished = finished
            self._wake()

    def fail(self, failure: Exception) -> None:
        """Fail all unfinished streams of the request and drop their unread tokens."""
        failed = [one for one in self.completions if not one.ended]
        for one in failed:
            one._failure = failure
            one._token_ids.clear()
            one._logprobs.clear()
            one._prompt_parts.clear()
        first = self._first
        if failed and first._reader is None and first._interrupt is not None:
            first._interrupt()
        if failed:
            self._wake()

    def _wake_as_scheduled(self) -> None:
        self._wake_scheduled = False
        self._wake()

    def _wake(self) -> None:
        first = self._first
        if first._preparation is not None and first.ended:
            first._preparation.cancel()
        reader, first._reader = first._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


def _column_bytes(part: PromptLogprobs) -> int:
    return len(part.chosen) + len(part.top_ids) + len(part.top_logprobs)
