"""`GenerationService` on the control port: what an operator calls, and nothing that takes part in generating."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc

from runahead.service.contract.errors import ServiceError
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import EngineClient
from runahead.service.servicers.abort import abort
from runahead.service.stats.stats_feed import StatsFeed
from runahead.service.stats.trace import trace
from runahead.v1 import (
    AbortRequest,
    AbortResponse,
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
    """Stats, WatchStats, Trace and Abort. `CallInterceptor` turns what methods raise into a status."""

    def __init__(self, engine: EngineClient, feed: StatsFeed) -> None:
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
    """The control port's methods, by a connection to the engine that no completion uses."""

    async def _elsewhere(self, request: object, context: _Context) -> NoReturn:
        raise ServiceError(
            "NOT_SERVED", "the control port serves Stats, WatchStats, Trace and Abort; call the service's own"
        )

    Generate = GenerateOnce = GetModelInfo = Tokenize = Detokenize = RenderChat = _elsewhere
