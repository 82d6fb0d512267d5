"""`GenerationService` on the control port: operators' methods, without generation."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc

from runahead.service.calls.admission import current_caller
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.validation import check_abort, check_known, engine_prefix
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.service.stats.stats import StatsFeed
from runahead.service.stats.trace import trace
from runahead.v1 import (
    AbortRequest,
    AbortResponse,
    AbortResult,
    GenerationServiceServicer,
    StatsRequest,
    StatsResponse,
    TraceRequest,
    TraceResponse,
    WatchStatsRequest,
)

NOT_SERVED: Final = ("Generate", "GenerateOnce", "GetModelInfo", "Tokenize", "Detokenize", "RenderChat")
_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(GenerationServiceServicer):
    """Stats, WatchStats, Trace and Abort. `CallInterceptor` turns exceptions into statuses."""

    def __init__(self, engine: SocketEngineClient, feed: StatsFeed) -> None:
        self._engine = engine
        self._feed = feed

    async def Abort(self, request: AbortRequest, context: _Context) -> AbortResponse:
        return await abort(self._engine, request)

    async def Stats(self, request: StatsRequest, context: _Context) -> StatsResponse:
        check_known(request)
        return StatsResponse(stats=await self._feed.stats())

    async def WatchStats(self, request: WatchStatsRequest, context: _Context) -> None:
        await self._feed.watch(request, context)

    async def Trace(self, request: TraceRequest, context: _Context) -> TraceResponse:
        return await trace(self._engine, request)


class ControlServicer(OperatorServicer):
    """The control port's methods, over an engine connection without completions."""

    async def _elsewhere(self, request: object, context: _Context) -> NoReturn:
        raise ServiceError(
            "NOT_SERVED", "the control port serves Stats, WatchStats, Trace and Abort; call the service's own"
        )

    Generate = GenerateOnce = GetModelInfo = Tokenize = Detokenize = RenderChat = _elsewhere


async def abort(engine: SocketEngineClient, request: AbortRequest) -> AbortResponse:
    """Abort requests for the current caller. One with the right `control` may name requests of others, as `alice/r1`.

    Raises ServiceError (INVALID_ARGUMENT) or EngineLostError.
    """
    caller = current_caller()
    reaches_everybody = bool(caller.name) and "control" in caller.rights
    check_abort(request, may_name_callers=reaches_everybody)
    prefix = engine_prefix(caller)
    ids = tuple(one if "/" in one else prefix + one for one in request.request_ids)
    result = await engine.abort(ids, request.all, reach="" if reaches_everybody else prefix)
    names = request.request_ids or [engine_id.removeprefix(prefix) for engine_id in result.request_ids]
    return AbortResponse(
        results=[
            AbortResult(request_id=name, outcome=f"ABORT_OUTCOME_{outcome}")
            for name, outcome in zip(names, result.outcomes, strict=True)
        ]
    )
