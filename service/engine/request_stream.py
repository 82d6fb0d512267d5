"""What the engine says of one request, between the engine's connection and the call that reads it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from runahead.runtime.wire.frames import ProtocolError
from runahead.runtime.wire.messages import Admitted, Finished, Logprobs, PromptLogprobs

T = TypeVar("T")

_TOKEN_BYTES: Final = 48  # a buffered token, and a buffered top entry: what they take in memory, about
_TOP_BYTES: Final = 32
_ENTRY_BYTES: Final = 4  # of a column of prompt log-probabilities


class RequestRefusedError(Exception):
    """The engine did not queue the request."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class EngineLostError(Exception):
    """The engine has stopped, its connection is gone, or it does not answer. The message is fit for a client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def again(self) -> EngineLostError:
        """The same, as an exception of its own for another waiter."""
        return EngineLostError(self.reason, self.message)


class SlowReaderError(Exception):
    """The reader left more than its share unread."""


class StalledReaderError(Exception):
    """Nothing was read for too long. after_s: for how many seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


class TokenBatch(msgspec.Struct, frozen=True):
    """All that was waiting: tokens in order, and the end if it has come. Nothing follows an end.

    logprobs: of each token, where they were asked for. admitted: what was said when the request got its row, whether in
    this batch or before; with any token, it was said.
    """

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    finished: Finished | None
    admitted: Admitted | None


class RequestStream:
    """A bounded buffer with one reader, on one event loop. It ends once: finished, refused or failed.

    However many tokens arrive before the reader comes back, it wakes once and takes them all. Log-probabilities of the
    prompt come before, and are taken message by message: a message is as much as a launch computes.

    prompt_logprobs: how many tokens of the prompt the engine will describe.
    unread_bytes: what may be buffered of tokens, estimated.
    unread_prompt_bytes: what may be buffered of the prompt, in the engine's columns; one message always has room.
    wake_in_turn: calls what it is given soon, for a stream that has new tokens: see `Waking`. None: at once.
    submitted_at: the moment that all its times begin at, here and in the engine: it is made when its request is
    submitted, or announced before. In seconds on the monotonic clock.
    first: the stream of completion 0, where this one is of another completion of the same request; None: it is of
    completion 0. Streams of one request have one reader and one bound, and if one fails all do. What is said of the
    request and its prompt comes to the first.
    """

    def __init__(
        self,
        handle: int,
        unread_bytes: int,
        prompt_logprobs: int = 0,
        unread_prompt_bytes: int = 0,
        wake_in_turn: Callable[[Callable[[], None]], None] | None = None,
        first: RequestStream | None = None,
    ) -> None:
        self.handle = handle
        self.submitted_at = time.monotonic()
        self._unread_limit = unread_bytes
        self._unread = 0
        self._unread_prompt_limit = unread_prompt_bytes
        self._unread_prompt = 0
        self._prompt_parts: deque[PromptLogprobs] = deque()
        self._prompt_next = 1  # the place in the prompt that the next part begins at: the first token has none
        self._prompt_end = 1 + prompt_logprobs
        self._admitted: Admitted | None = None
        self._interrupt: Callable[[], object] | None = None
        self._when_admitted: Callable[[], object] | None = None
        self._preparation: asyncio.Future[Any] | None = None  # what its reader does until it is submitted
        self._accepted = False
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs | None] = []
        self._finished: Finished | None = None
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._wake_in_turn = wake_in_turn
        self._has_turn = False  # its reader is going to be woken in its turn
        self._first = first or self
        self.completions: list[RequestStream] = [] if first is None else first.completions  # of the request, by index
        self.completions.append(self)
        self._untaken = 0  # of `_unread` of the first, this one's

    @property
    def failure(self) -> Exception | None:
        """Why the request's streams failed or were refused, if they did."""
        return next((one._failure for one in self.completions if one._failure is not None), None)

    @property
    def unread_bytes(self) -> int:
        """What its reader has not taken, as estimated."""
        return self._unread + self._unread_prompt

    @property
    def admitted(self) -> Admitted | None:
        """What was said when the request got its row; None before."""
        return self._admitted

    @property
    def ended(self) -> bool:
        """No more will arrive."""
        return self._finished is not None or self._failure is not None

    @property
    def has_more(self) -> bool:
        """`take` would not wait."""
        return bool(self._token_ids) or self.ended

    # ------------------------------------------------------------ the reader's side

    async def accepted(self) -> None:
        """Returns when the engine has queued the request. Raises RequestRefusedError or EngineLostError."""
        while not self._accepted and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure

    async def unless_ended(self, preparation: Coroutine[object, object, T]) -> T | None:
        """What `preparation` makes for the request, which is announced. None if the stream ends before: it is cancelled
        then. Raises what it raises."""
        task: asyncio.Future[T] = asyncio.ensure_future(preparation)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for it any more
        self._preparation = task
        try:
            await asyncio.wait({task})
            return None if self.ended else task.result()
        finally:
            self._preparation = None
            task.cancel()

    def expect_prompt(self, prompt_logprobs: int) -> None:
        """The engine will describe so many tokens of the prompt."""
        self._prompt_end = 1 + prompt_logprobs

    def interrupt_with(self, interrupt: Callable[[], object]) -> None:
        """Called at most once, if the stream fails from now on while its reader is busy elsewhere, writing."""
        self._interrupt = interrupt

    def tell_of_admission(self, tell: Callable[[], object]) -> None:
        """Called once, when the completion is given a row."""
        self._when_admitted = tell

    async def take_prompt(self) -> PromptLogprobs | None:
        """The next part of the prompt's log-probabilities; None if there are no more: all were taken, or the request
        has ended before. Raises EngineLostError or SlowReaderError."""
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
        """At least one token, or the end. Raises EngineLostError or SlowReaderError."""
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
        """Returns when something was said of the request since."""
        await self._wait()

    def _wait(self) -> asyncio.Future[None]:
        reader = self._first._reader = asyncio.get_running_loop().create_future()
        return reader

    # ------------------------------------------------------------ the connection's side

    def accept(self) -> None:
        """The engine has queued the request."""
        self._accepted = True
        self._wake()

    def admit(self, admitted: Admitted) -> None:
        """The request was given a row."""
        self._admitted = admitted
        tell, self._when_admitted = self._when_admitted, None
        if tell is not None:
            tell()

    def push_prompt(self, part: PromptLogprobs) -> bool:
        """Log-probabilities of the prompt. False if the buffer has no room for them: the stream has failed then.

        Raises ProtocolError for a part that is not the next one, or whose columns do not fit each other.
        """
        count = len(part.chosen) // _ENTRY_BYTES
        if part.offset != self._prompt_next or not 0 < count <= self._prompt_end - self._prompt_next:
            raise ProtocolError(
                f"log-probabilities of {count} prompt tokens from {part.offset} on, where those of "
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
        """A token. False if the buffer has no room for it: the stream has failed then.

        Raises ProtocolError if the prompt's log-probabilities are not complete.
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
        if self._wake_in_turn is None:
            self._wake()
        elif first._reader is not None and not first._has_turn:
            first._has_turn = True
            self._wake_in_turn(first._take_turn)
        return True

    def finish(self, finished: Finished) -> None:
        """The end, as the engine saw it."""
        if not self.ended:
            self._finished = finished
            self._wake()

    def fail(self, failure: Exception) -> None:
        """The end of all streams of the request that have not ended, by a failure. What was not taken of them is
        dropped."""
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

    def _take_turn(self) -> None:
        self._has_turn = False
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
