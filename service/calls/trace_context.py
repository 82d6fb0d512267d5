"""What a call is known by on its whole way: the header `x-request-id`, and W3C's `traceparent`.

Both are taken from the call's metadata where they are well formed, and made where they are not: a header that is wrong
costs the trace, never the call. See https://www.w3.org/TR/trace-context.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

REQUEST_ID_HEADER: Final = "x-request-id"
TRACE_HEADER: Final = "traceparent"

SAMPLED: Final = 0x01  # the flag that asks for the trace to be kept

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACE: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_TRACE: Final = 256  # characters of a header; a longer one is not looked at


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a call stands in its trace.

    request_id: the header's. trace_id: 32 hexadecimal digits. parent_id: of the caller's span, 16 digits; empty where
    the trace begins here. span_id: of the call itself, 16 digits. flags: `SAMPLED` or 0, as the caller
    gave it.
    """

    request_id: str
    trace_id: str
    parent_id: str
    span_id: str
    flags: int

    @property
    def traceparent(self) -> str:
        """The header for whoever is called next, and for the answer: its parent is this call."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What an answer carries."""
        return (REQUEST_ID_HEADER, self.request_id), (TRACE_HEADER, self.traceparent)


def trace_context(metadata: Iterable[tuple[str, object]], flags: int = 0) -> TraceContext:
    """Of a call with this metadata. flags: of a trace that begins here."""
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
    """Trace, span and the flags that we know of a header `traceparent`; empty and 0 for one that is not well formed."""
    found = _TRACE.fullmatch(parent)
    if found is None:
        return "", "", 0
    version, trace_id, parent_id, flags, more = found.groups()
    is_known = version != "ff" and not (version == "00" and more)  # a later version may say more
    if not is_known or not int(trace_id, 16) or not int(parent_id, 16):
        return "", "", 0
    return trace_id, parent_id, int(flags, 16) & SAMPLED


def _only(values: list[object]) -> str:
    """The one value of a header; empty where there is none, several, or one that is no text of a header's length."""
    if len(values) == 1 and isinstance(values[0], str) and len(values[0]) <= _MOST_TRACE:
        return values[0]
    return ""
