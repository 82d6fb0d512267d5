"""Maps request ids between callers and the engine.

The engine serves all front ends and names a request by caller and id, so callers can use equal ids, and another
caller's id does not exist for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runahead.service.contract.validation import CheckedRequest
from runahead.service.credentials.callers import Caller


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
