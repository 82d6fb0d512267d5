"""What the engine says of one request, between the engine's connection and the call that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from runtime.messages import Finished, Logprobs

_TOKEN_BYTES: Final = 48  # a buffered token, and a buffered top entry: what they take in memory, about
_TOP_BYTES: Final = 32


class RequestRefusedError(Exception):
    """The engine did not queue the request."""

    def __init__(self, code: str, message: str, field: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class EngineLostError(Exception):
    """The engine has stopped, or its connection is gone. The message is fit for a client."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    def again(self) -> EngineLostError:
        """The same, as an exception of its own for another waiter."""
        return EngineLostError(self.reason, self.message)


class SlowReaderError(Exception):
    """The reader left more than its share unread."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token, with its log-probabilities where they were asked for."""

    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All that was waiting: tokens in order, and the end if it has come. Nothing follows an end."""

    tokens: list[GeneratedToken]
    finished: Finished | None


class RequestStream:
    """A bounded buffer with one reader, on one event loop. It ends once: finished, refused or failed.

    However many tokens arrive before the reader comes back, it wakes once and takes them all.
    """

    def __init__(self, handle: int, unread_bytes: int) -> None:
        self.handle = handle
        self._unread_limit = unread_bytes
        self._unread = 0
        self._interrupt: Callable[[], object] | None = None
        self._accepted = False
        self._tokens: list[GeneratedToken] = []
        self._finished: Finished | None = None
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def failure(self) -> Exception | None:
        """Why the stream failed or was refused, if it did."""
        return self._failure

    @property
    def ended(self) -> bool:
        """No more will arrive."""
        return self._finished is not None or self._failure is not None

    # ------------------------------------------------------------ the reader's side

    async def accepted(self) -> None:
        """Returns when the engine has queued the request. Raises RequestRefusedError or EngineLostError."""
        while not self._accepted and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure

    def interrupt_with(self, interrupt: Callable[[], object]) -> None:
        """Called at most once, if the stream fails from now on while its reader is busy elsewhere, writing."""
        self._interrupt = interrupt

    async def take(self) -> TokenBatch:
        """At least one token, or the end. Raises EngineLostError or SlowReaderError."""
        while not self._tokens and not self.ended:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        tokens, self._tokens, self._unread = self._tokens, [], 0
        return TokenBatch(tokens, self._finished)

    async def _wait(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    # ------------------------------------------------------------ the connection's side

    def accept(self) -> None:
        """The engine has queued the request."""
        self._accepted = True
        self._wake()

    def push(self, token_id: int, logprobs: Logprobs | None) -> bool:
        """A token. False if the buffer has no room for it: the stream has failed then."""
        self._unread += _TOKEN_BYTES + (_TOP_BYTES * len(logprobs.top_ids) if logprobs else 0)
        if self._unread > self._unread_limit:
            self.fail(SlowReaderError())
            return False
        self._tokens.append(GeneratedToken(token_id, logprobs))
        self._wake()
        return True

    def finish(self, finished: Finished) -> None:
        """The end, as the engine saw it."""
        if not self.ended:
            self._finished = finished
            self._wake()

    def fail(self, failure: Exception) -> None:
        """The end, by a failure. What was not taken is dropped."""
        if self.ended:
            return
        self._failure = failure
        self._tokens.clear()
        if self._reader is None and self._interrupt is not None:
            self._interrupt()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
