"""What a completion used, as the contract says it."""

from __future__ import annotations

from runahead.runtime.wire import messages
from runahead.v1 import Usage


def usage(
    end: messages.Finished | None, admitted: messages.Admitted | None, prompt_tokens: int, completion_tokens: int
) -> Usage:
    """end, admitted: what the engine has sent of the request, None where it has not. Of drafts nothing is said before
    its end."""
    told = end or admitted
    found = Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=told.cached_tokens if told else 0,
        completion_tokens=completion_tokens,
    )
    if end is not None:
        found.drafted_tokens, found.accepted_tokens = sum(end.drafted), sum(end.accepted)
        found.drafted_by_place.update(enumerate(end.drafted, start=1))
        found.accepted_by_place.update(enumerate(end.accepted, start=1))
        if end.tokens_per_launch:
            found.tokens_per_launch = end.tokens_per_launch
    return found
