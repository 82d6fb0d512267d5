"""A request that the engine has queued, and the events that are made of what comes of its completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from runahead.runtime.wire.parameters import FinishReason as EngineReason
from runahead.service.completion.completion import Completion
from runahead.service.completion.prompt_events import PromptEvents
from runahead.service.contract.errors import ServiceError
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.engine.request_stream import RequestStream
from runahead.v1 import Accepted, Finished, GenerateResponse, Prompt


class OpenCompletion:
    """One request with one or more completions, by index. stream: of the first; `RequestStream.completions` are all."""

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
        self._open = list(range(len(completions)))  # indexes whose end was not sent, whose turn is next first
        self.accepted = accepted

    @property
    def n(self) -> int:
        """Completions."""
        return len(self._completions)

    @property
    def is_over(self) -> bool:
        """The end of each completion was taken."""
        return not self._open

    def cached_tokens(self, index: int) -> int:
        """Of the prompt, taken from the prefix cache by this completion; 0 before it is known."""
        admitted = self._streams[index].admitted
        return admitted.cached_tokens if admitted else 0

    def interrupt_writes(self) -> None:
        """From now on, a write that is stuck because nobody reads is cancelled if the streams fail.

        Called when the call's headers are out: no status can be sent before.
        """
        task = asyncio.current_task()
        assert task is not None
        self._stream.interrupt_with(task.cancel)

    async def prompt_events(self) -> AsyncIterator[Prompt]:
        """The prompt's tokens where they were asked for, as the engine describes them, to be taken before any delta.

        Fewer than all if the request ends before. Raises what `RequestStream.take_prompt` raises.
        """
        for event in self._prompt.without_logprobs():
            yield event
        while (part := await self._stream.take_prompt()) is not None:
            for event in self._prompt.with_logprobs(part):
                yield event

    async def next_event(self) -> GenerateResponse | None:
        """The next delta of a completion, with all tokens of it that are there and that it may carry, or its end. Waits
        for one; completions take turns. None after the last end.

        Raises what `RequestStream.take` and `Completion.fill` raise.
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
        """What there is of this completion; None: nothing yet."""
        completion, stream = self._completions[index], self._streams[index]
        while completion.has_room and stream.has_more:
            completion.add(await stream.take())
            if completion.finished is not None:
                # Before the end is written: a stream that is still open could fail meanwhile, and an error would follow
                # the end.
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
    """What a request has used and when, and how its first completion ended: the tokens are those of all completions."""
    parts = [one.so_far(of.admitted) for one, of in zip(completions, stream.completions, strict=True)]
    found = Finished()
    found.CopyFrom(parts[0])
    found.usage.completion_tokens = sum(part.usage.completion_tokens for part in parts)
    return found
