"""`Abort`: which requests a caller may end, and what became of each."""

from __future__ import annotations

from runahead.service.calls.access import current_caller
from runahead.service.calls.ownership import Ownership
from runahead.service.contract.validation import check_abort
from runahead.service.engine.engine_client import EngineClient
from runahead.v1 import AbortRequest, AbortResponse, AbortResult


async def abort(engine: EngineClient, request: AbortRequest) -> AbortResponse:
    """On behalf of the current caller. Raises ServiceError (INVALID_ARGUMENT) or EngineLostError."""
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
