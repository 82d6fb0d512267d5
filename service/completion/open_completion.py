"""A queued request and the events of its completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.completion.completion import Completion
from runahead.service.completion.events import PromptEvents
from runahead.service.contract.errors import ServiceError
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.v1 import Accepted, Finished, GenerateResponse, Prompt


class OpenCompletion:
    """One request with one or more completions, by index. stream: the first one's; `RequestStream.completions` has
    all.
    """

    def __init__(
        self,
        engine: SocketEngineClient,
        stream: RequestStream,
        prompt: PromptEvents,
        completions: Sequence[Completion],
        accepted: Accepted,
    ) -> None:
        self._engine = engine
        self._stream = stream
        self._prompt = prompt
        self._completions = completions
        self._streams = stream.completions
        self._open = list(range(len(completions)))  # indexes whose end was not sent, next turn first
        self.accepted = accepted

    @property
    def n(self) -> int:
        """The number of completions."""
        return len(self._completions)

    @property
    def is_over(self) -> bool:
        """Whether the end of each completion was taken."""
        return not self._open

    def cached_tokens(self, index: int) -> int:
        """Return this completion's prompt tokens from the prefix cache; 0 before that is known."""
        admitted = self._streams[index].admitted
        return admitted.cached_tokens if admitted else 0

    def interrupt_writes(self) -> None:
        """Let a failure of the streams cancel a write that is stuck on a client that does not read.

        Call it once the headers are sent: no status can be sent before.
        """
        task = asyncio.current_task()
        assert task is not None
        self._stream.interrupt_with(task.cancel)

    async def prompt_events(self) -> AsyncIterator[Prompt]:
        """Yield the prompt's tokens if requested, as the engine describes them. Take them before any delta.

        Incomplete if the request ends first. Raises the errors of `RequestStream.take_prompt`.
        """
        for event in self._prompt.without_logprobs():
            yield event
        while (part := await self._stream.take_prompt()) is not None:
            for event in self._prompt.with_logprobs(part):
                yield event

    async def next_event(self) -> GenerateResponse | None:
        """Wait for the next delta of a completion, with all tokens that are ready and fit, or for its end. Completions
        take turns. None after the last end.

        Raises the errors of `RequestStream.take` and `Completion.fill`.
        """
        while self._open:
            for turn, index in enumerate(self._open):
                event = await self._event_of(index)
                if event is not None:
                    del self._open[turn]
                    if not event.HasField("finished"):
                        self._open.append(index)
                    return event
            await self._stream.wait()
        return None

    async def _event_of(self, index: int) -> GenerateResponse | None:
        """Return this completion's next event, or None if nothing is ready."""
        completion, stream = self._completions[index], self._streams[index]
        while completion.has_room and stream.has_more:
            completion.add(await stream.take())
            if completion.finished is not None:
                # Before the end is written: an open stream could fail meanwhile, and an error would follow the end.
                self._engine.release_one(stream, EngineReason.STOP)
        event = GenerateResponse()
        try:
            if completion.fill(event.delta):
                event.delta.index = index
                return event
        except ServiceError as error:
            raise error.at_index(index) if len(self._completions) > 1 else error from None
        if completion.finished is None:
            return None
        completion.finished.index = index
        return GenerateResponse(finished=completion.finished)


def so_far(completions: Sequence[Completion], stream: RequestStream) -> Finished:
    """Return a request's usage and times with its first completion's end; tokens count over all completions."""
    parts = [one.so_far(of.admitted) for one, of in zip(completions, stream.completions, strict=True)]
    found = Finished()
    found.CopyFrom(parts[0])
    found.usage.completion_tokens = sum(part.usage.completion_tokens for part in parts)
    return found
