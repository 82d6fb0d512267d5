"""`GenerationService` on the control port: operators' methods, without generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import grpc

from runahead.service.calls.admission import current_caller
from runahead.service.contract.errors import ServiceError
from runahead.service.contract.validation import CheckedRequest, check_abort, check_known
from runahead.service.credentials.callers import Caller
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
    """Abort requests for the current caller. Raises ServiceError (INVALID_ARGUMENT) or EngineLostError."""
    owner = Ownership(current_caller())
    check_abort(request, may_name_callers=owner.reaches_everybody)
    ids = tuple(owner.engine_id(request_id) for request_id in request.request_ids)
    result = await engine.abort(ids, request.all, owner.reach)
    return AbortResponse(
        results=[
            AbortResult(request_id=owner.shown_id(engine_id), outcome=f"ABORT_OUTCOME_{outcome}")
            for engine_id, outcome in zip(result.request_ids, result.outcomes, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class Ownership:
    """A caller's request ids in the engine: unchanged without authentication."""

    caller: Caller

    @property
    def reaches_everybody(self) -> bool:
        """Whether the caller may end other callers' requests, written with the caller first: `alice/r1`."""
        return bool(self.caller.name) and "control" in self.caller.rights

    @property
    def reach(self) -> str:
        """Return the id prefix of all requests that the caller may end."""
        return "" if self.reaches_everybody else self._prefix

    def own(self, request: CheckedRequest, *, shares_prefixes: bool) -> CheckedRequest:
        """Return the request as the engine gets it. Unless prefixes are shared, it finds only its caller's blocks."""
        salt = request.cache_salt if shares_prefixes else self._prefix + request.cache_salt
        return replace(
            request,
            engine_id=self._prefix + request.request_id,
            cache_salt=salt,
            caller=self.caller.name,
            outranks="priority" in self.caller.rights,
        )

    def engine_id(self, request_id: str) -> str:
        """Return the engine's id for a caller's id."""
        return request_id if "/" in request_id else self._prefix + request_id

    def shown_id(self, engine_id: str) -> str:
        """Return the caller's id for an engine's id."""
        return engine_id.removeprefix(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"{self.caller.name}/" if self.caller.name else ""
