"""How prompts share launches, reported by the engine."""

from __future__ import annotations

import msgspec


class PromptLaunches(msgspec.Struct, frozen=True):
    """Bounds of prompt tokens. chunk: multiples at which prompts are cut. launch: of a launch. queued: of a launch and
    the uncommitted ones before it. why: the reason for these and for the number of rows. mixed: of a launch with
    decoding rows, unless they are one chunk.
    """

    chunk: int
    launch: int
    queued: int
    why: str
    mixed: int = 0
