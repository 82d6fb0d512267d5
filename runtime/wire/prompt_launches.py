"""How prompts share launches, as the engine tells its front ends."""

from __future__ import annotations

import msgspec


class PromptLaunches(msgspec.Struct, frozen=True):
    """How prompts share launches, in tokens. chunk: where they are cut. launch: that a launch may carry. queued: that a
    launch and the uncommitted ones that it is queued behind may carry. why: the reason for these and for the number of
    rows, in words. mixed: that a launch may carry while rows decode in it, unless they are one chunk."""

    chunk: int
    launch: int
    queued: int
    why: str
    mixed: int = 0
