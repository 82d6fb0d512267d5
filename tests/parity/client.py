"""Runs a workload against a service over gRPC and writes down everything that its streams said."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc

from runahead.v1 import (
    AbortRequest,
    Delta,
    Finished,
    FinishReason,
    GenerateResponse,
    GenerationServiceStub,
    Prompt,
    ServerStats,
    StatsRequest,
    Token,
)
from tests.parity.workload import Asked

# A token's log-probability and those of the most likely ones, as sent; None where none was sent.
Scored = tuple[float | None, tuple[tuple[int, float], ...]]


@dataclass(slots=True)
class Answer:
    """What one stream said. `logprobs`: of each token that came with one, the chosen one's and the top ones'.

    prompt_tokens, prompt_logprobs: of the prompt's tokens that were sent back, each once and in order.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Scored] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[Scored] = field(default_factory=list)
    reason: str = ""
    stop: str = ""
    seed: int = 0
    prompt_length: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafts: tuple[int, int] | None = None  # looked at, and right; None where they were not said
    by_place: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))  # of a run, from 1 on
    terminals: int = 0
    after_terminal: int = 0
    aborted: bool = False
    cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.terminals > 0 or self.cancelled

    def take(self, response: GenerateResponse) -> None:
        """One message of the stream. Raises ValueError for a part of the prompt out of its order."""
        self.after_terminal += self.terminals > 0
        match response.WhichOneof("event"):
            case "accepted":
                self.prompt_length = response.accepted.prompt_tokens
            case "prompt":
                self._take_prompt(response.prompt)
            case "delta":
                self._take_delta(response.delta)
            case "finished":
                self._take_end(response.finished)

    def _take_prompt(self, prompt: Prompt) -> None:
        if prompt.offset != len(self.prompt_tokens) or self.tokens:
            raise ValueError(f"prompt tokens from {prompt.offset} on came after {len(self.prompt_tokens)} of them")
        self.prompt_tokens += [token.id for token in prompt.tokens]
        self.prompt_logprobs += [_scored(token) for token in prompt.tokens]

    def _take_delta(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += [token.id for token in delta.tokens]
        self.logprobs += [_scored(token) for token in delta.tokens if token.HasField("logprob")]

    def _take_end(self, finished: Finished) -> None:
        self.terminals += 1
        self.reason = FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
        self.stop = str(getattr(finished.stop, finished.stop.WhichOneof("match") or "", ""))
        self.seed = finished.seed
        self.cached_tokens = finished.usage.cached_tokens
        self.completion_tokens = finished.usage.completion_tokens
        if finished.usage.HasField("drafted_tokens"):
            self.drafts = finished.usage.drafted_tokens, finished.usage.accepted_tokens
            self.by_place = dict(finished.usage.drafted_by_place), dict(finished.usage.accepted_by_place)


def _scored(token: Token) -> Scored:
    logprob = token.logprob if token.HasField("logprob") else None
    return logprob, tuple((top.id, top.logprob) for top in token.top)


class _Run:
    """One workload on one service. A request may wait until another one's stream has come so far."""

    def __init__(self, stub: GenerationServiceStub, workload: list[Asked]) -> None:
        self._stub = stub
        self._workload = workload
        self._answers = [Answer() for _ in workload]
        self._moved = asyncio.Condition()  # a stream has brought something, or is over

    async def answers(self) -> list[Answer]:
        await asyncio.gather(*map(self._follow, range(len(self._workload))))
        return self._answers

    async def _follow(self, i: int) -> None:
        asked, answer = self._workload[i], self._answers[i]
        if asked.after is not None:
            await self._wait_for(self._answers[asked.after.request], asked.after.tokens)
        await asyncio.sleep(asked.delay_s)
        call = self._stub.Generate(asked.request)
        try:
            async for response in call:
                answer.take(response)
                if asked.cancel_after and len(answer.tokens) >= asked.cancel_after:
                    answer.cancelled = True
                    call.cancel()
                    break
                await self._tell()
                await self._abort_if_due(asked, answer)
        except grpc.aio.AioRpcError as error:
            answer.terminals += 1
            answer.reason = f"status {error.code().name}: {error.details()}"
        finally:
            await self._tell()

    async def _abort_if_due(self, asked: Asked, answer: Answer) -> None:
        if not asked.abort_after or answer.aborted or answer.is_over:
            return
        if len(answer.tokens) >= max(asked.abort_after, 0):
            answer.aborted = True
            await self._stub.Abort(AbortRequest(request_ids=[asked.request.request_id]))

    async def _wait_for(self, other: Answer, tokens: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: other.is_over or len(other.tokens) >= tokens)

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()


async def run_workload(url: str, workload: list[Asked]) -> list[Answer]:
    """All requests of a workload at once, each at its time."""
    async with grpc.aio.insecure_channel(url) as channel:
        return await _Run(GenerationServiceStub(channel), workload).answers()


async def stats_at_rest(url: str) -> ServerStats:
    """The service's figures once nothing is in flight: a cancelled row ends a little after its stream."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        for _ in range(1000):
            stats = (await stub.Stats(StatsRequest())).stats
            if stats.rows.free == stats.rows.total and stats.chain.launches == stats.chain.launches_retired:
                break
            await asyncio.sleep(0.01)
        return stats
