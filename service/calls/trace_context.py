"""A call's ids across services: the header `x-request-id` and W3C's `traceparent`.

Both come from the call's metadata if well formed, and are made otherwise: a malformed header costs the trace, never the
call. See https://www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
TRACE_HEADER: Final = "traceparent"

SAMPLED: Final = 0x01  # the sampled flag

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_TRACE: Final = 256  # characters of a header; longer ones are ignored


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A call's position in its trace.

    request_id: the header's. trace_id: 32 hexadecimal digits. parent_id: the caller's span, 16 digits; empty if the
    trace begins here. span_id: this call's, 16 digits. flags: the caller's `SAMPLED` or 0.
    """

    request_id: str
    trace_id: str
    parent_id: str
    span_id: str
    flags: int

    @property
    def traceparent(self) -> str:
        """The header for the next service and for the answer: its parent is this call."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of the answer."""
        return (REQUEST_ID_HEADER, self.request_id), (TRACE_HEADER, self.traceparent)


def trace_context(metadata: Iterable[tuple[str, object]], flags: int = 0) -> TraceContext:
    """Make the trace context of a call with this metadata. flags: for a trace that begins here."""
    given: dict[str, list[object]] = {REQUEST_ID_HEADER: [], TRACE_HEADER: []}
    for key, value in metadata:
        if key in given:
            given[key].append(value)
    request_id, parent = _only(given[REQUEST_ID_HEADER]), _only(given[TRACE_HEADER])
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = secrets.token_hex(16)
    trace_id, parent_id, parent_flags = _parsed(parent)
    return TraceContext(
        request_id=request_id,
        trace_id=trace_id or secrets.token_hex(16),
        parent_id=parent_id,
        span_id=secrets.token_hex(8),
        flags=parent_flags if trace_id else flags,
    )


def _parsed(parent: str) -> tuple[str, str, int]:
    """Parse a `traceparent` header into trace, span and known flags; empty and 0 if malformed."""
    found = _TRACE.fullmatch(parent)
    if found is None:
        return "", "", 0
    version, trace_id, parent_id, flags, more = found.groups()
    is_known = version != "ff" and not (version == "00" and more)  # a later version may have more fields
    if not is_known or not int(trace_id, 16) or not int(parent_id, 16):
        return "", "", 0
    return trace_id, parent_id, int(flags, 16) & SAMPLED


def _only(values: list[object]) -> str:
    """Return a header's only value; empty if it is missing, repeated, not text or too long."""
    if len(values) == 1 and isinstance(values[0], str) and len(values[0]) <= _MOST_TRACE:
        return values[0]
    return ""
