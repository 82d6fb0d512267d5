"""Runs a workload against a service over gRPC and writes down everything that its streams said."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc

from runahead.v1 import AbortRequest, FinishReason, GenerationServiceStub, StatsRequest
from tests.parity.workload import Asked


@dataclass(slots=True)
class Answer:
    """What one stream said. `logprobs`: of each token, the chosen one's and the top ones', as sent."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    reason: str = ""
    stop: str = ""
    completion_tokens: int = 0
    terminals: int = 0
    after_terminal: int = 0
    aborted: bool = False
    cancelled: bool = False


async def _follow(stub: GenerationServiceStub, asked: Asked) -> Answer:
    await asyncio.sleep(asked.delay_s)
    answer = Answer()
    call = stub.Generate(asked.request)
    request_id = asked.request.request_id

    async def maybe_cut() -> bool:
        """Abort or cancel, once the stream has come that far. True if the stream is to be left."""
        if asked.cancel_after and len(answer.tokens) >= asked.cancel_after:
            answer.cancelled = True
            call.cancel()
            return True
        due = asked.abort_after and len(answer.tokens) >= max(asked.abort_after, 0)
        if due and not answer.aborted and not answer.terminals:
            answer.aborted = True
            await stub.Abort(AbortRequest(request_ids=[request_id]))
        return False

    try:
        async for response in call:
            answer.after_terminal += answer.terminals > 0
            match response.WhichOneof("event"):
                case "delta":
                    _take_delta(answer, response.delta)
                case "finished":
                    answer.terminals += 1
                    answer.reason = FinishReason.Name(response.finished.reason).removeprefix("FINISH_REASON_")
                    stop = response.finished.stop
                    answer.stop = str(getattr(stop, stop.WhichOneof("match") or "", ""))
                    answer.completion_tokens = response.finished.usage.completion_tokens
            if await maybe_cut():
                break
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        if not answer.cancelled:
            answer.terminals += 1
            answer.reason = f"status {error.code().name}" if isinstance(error, grpc.aio.AioRpcError) else "cancelled"
    return answer


def _take_delta(answer: Answer, delta: object) -> None:
    answer.text += delta.text  # type: ignore[attr-defined]
    for token in delta.tokens:  # type: ignore[attr-defined]
        answer.tokens.append(token.id)
        if token.HasField("logprob"):
            answer.logprobs.append((token.logprob, tuple((top.id, top.logprob) for top in token.top)))


async def run_workload(url: str, workload: list[Asked]) -> list[Answer]:
    """All requests of a workload at once, each at its time."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        return list(await asyncio.gather(*(_follow(stub, asked) for asked in workload)))


async def stats_at_rest(url: str) -> object:
    """The service's figures once nothing is in flight: a cancelled row ends a little after its stream."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = GenerationServiceStub(channel)
        for _ in range(1000):
            stats = (await stub.Stats(StatsRequest())).stats
            if stats.rows.free == stats.rows.total and stats.chain.launches == stats.chain.launches_retired:
                break
            await asyncio.sleep(0.01)
        return stats
