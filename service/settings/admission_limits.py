"""The limits on what calls hold, as the settings set them. They are read without grpc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.held import Resource

# A reason of `errors.STATUS_OF`, part of the settings' names, and what a sentence calls what is held.
_KINDS: Final = {
    Resource.STREAMS: ("STREAMS_LIMIT", "streams", "completions are open"),
    Resource.QUEUED_TOKENS: ("QUEUED_TOKENS_LIMIT", "queued_tokens", "tokens of prompts wait"),
    Resource.TOKENIZING_BYTES: ("TOKENIZING_LIMIT", "tokenizing_bytes", "bytes of text wait for the tokenizer"),
    Resource.UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
    Resource.CONTROL_UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """How much there is of a resource.

    setting: what comes behind `max_` in the setting's name, and behind `max_caller_` in that of a caller's. what: as a
    sentence calls what is held.
    """

    reason: str
    setting: str
    what: str
    in_all: int
    of_a_caller: int


def limits_of(settings: FrontEndSettings, *, callers_have_names: bool) -> dict[Resource, Limit]:
    """A caller's limit that is not set is half of all, so that no caller alone keeps the others out. Where callers are
    known by their addresses alone it is all: behind one address, such as this machine's own, there may be everybody.
    """
    limits: dict[Resource, Limit] = {}
    for resource, (reason, name, what) in _KINDS.items():
        in_all = getattr(settings, f"max_{name}")
        unset = max(1, in_all // 2) if callers_have_names else in_all
        limits[resource] = Limit(reason, name, what, in_all, getattr(settings, f"max_caller_{name}") or unset)
    return limits


def check_limits(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Raises ConfigError where a caller may have more than there is."""
    for limit in limits_of(settings, callers_have_names=False).values():
        if limit.of_a_caller > limit.in_all:
            one, other = f"max_caller_{limit.setting}", f"max_{limit.setting}"
            raise ConfigError(
                f"{spelling(one)} {limit.of_a_caller} is more than all callers may have together, which is "
                f"{spelling(other)} {limit.in_all}"
            )
