"""Whose a request is.

The engine, which serves every front end, knows a request by its caller's name and its id. So callers can use the same
ids, and an id of somebody else's is one that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runahead.service.contract.validation import CheckedRequest
from runahead.service.credentials.callers import Caller


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a caller's requests are called in the engine: by their ids alone where nobody is asked who they are."""

    caller: Caller

    @property
    def reaches_everybody(self) -> bool:
        """The caller may end others' requests, which it names with the caller before them: `alice/r1`."""
        return bool(self.caller.name) and "control" in self.caller.rights

    @property
    def reach(self) -> str:
        """How the ids of all requests begin that the caller may end."""
        return "" if self.reaches_everybody else self._prefix

    def own(self, request: CheckedRequest, *, shares_prefixes: bool) -> CheckedRequest:
        """The caller's request as the engine gets it. Unless prefixes are shared, it finds the caller's alone."""
        salt = request.cache_salt if shares_prefixes else self._prefix + request.cache_salt
        return replace(
            request,
            engine_id=self._prefix + request.request_id,
            cache_salt=salt,
            caller=self.caller.name,
            outranks="priority" in self.caller.rights,
        )

    def engine_id(self, request_id: str) -> str:
        """The engine's name for an id that the caller gives."""
        return request_id if "/" in request_id else self._prefix + request_id

    def shown_id(self, engine_id: str) -> str:
        """The caller's own name for a request of the engine."""
        return engine_id.removeprefix(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"{self.caller.name}/" if self.caller.name else ""
