"""Limits of held resources, from the settings. Imports no gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError, Spelling
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.held import Resource

# Reasons of `errors.STATUS_OF`, parts of the settings' names, and the resources' names in sentences.
_KINDS: Final = {
    Resource.STREAMS: ("STREAMS_LIMIT", "streams", "completions are open"),
    Resource.QUEUED_TOKENS: ("QUEUED_TOKENS_LIMIT", "queued_tokens", "tokens of prompts wait"),
    Resource.TOKENIZING_BYTES: ("TOKENIZING_LIMIT", "tokenizing_bytes", "bytes of text wait for the tokenizer"),
    Resource.UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
    Resource.CONTROL_UPLOADS: ("UPLOADS_LIMIT", "uploads", "calls have not sent their whole request"),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource's limit.

    setting: the setting's name after `max_`, and after `max_caller_` for a caller's. what: the resource's name in
    sentences.
    """

    reason: str
    setting: str
    what: str
    in_all: int
    of_a_caller: int


def limits_of(settings: FrontEndSettings, *, callers_have_names: bool) -> dict[Resource, Limit]:
    """Return the limits. A caller's default is half of the total, so that one caller can't keep others out; without
    names it is the total, because many clients may share an address.
    """
    limits: dict[Resource, Limit] = {}
    for resource, (reason, name, what) in _KINDS.items():
        in_all = getattr(settings, f"max_{name}")
        unset = max(1, in_all // 2) if callers_have_names else in_all
        limits[resource] = Limit(reason, name, what, in_all, getattr(settings, f"max_caller_{name}") or unset)
    return limits


def check_limits(settings: FrontEndSettings, spelling: Spelling) -> None:
    """Check that no caller's limit exceeds the total. Raises ConfigError."""
    for limit in limits_of(settings, callers_have_names=False).values():
        if limit.of_a_caller > limit.in_all:
            one, other = f"max_caller_{limit.setting}", f"max_{limit.setting}"
            raise ConfigError(
                f"{spelling(one)} {limit.of_a_caller} is more than all callers may have together, which is "
                f"{spelling(other)} {limit.in_all}"
            )
