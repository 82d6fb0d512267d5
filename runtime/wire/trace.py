"""Times of an engine's newest launches in a `TraceReply`."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_TRACED: Final = 256  # recorded launches


class LaunchTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A launch's times. `_s`: seconds on the engine's clock; `_ns`: nanoseconds on the device's.

    kind: decode, mixed or closing. rows, prompt_tokens: of its F. overlapped, first: see `Launch`. plan_s, stage_s: the
    host began to plan, to stage. launch_s, enqueued_s: before and after the call of the device. commit_s: the host
    began to commit the tokens. publish_s, published_s: before and after it sent them. ended_s: the check that found F
    ended. idle_inside_ns: within the launch, between its pieces. other_ranks_ns: from rank 1 on, start and end on the
    clock of the rank's device.
    """

    number: int
    kind: str
    rows: int
    prompt_tokens: int
    overlapped: bool
    first: bool
    plan_s: float
    stage_s: float
    launch_s: float
    enqueued_s: float
    commit_s: float
    publish_s: float
    published_s: float
    ended_s: float
    start_ns: int
    end_ns: int
    idle_inside_ns: int
    other_ranks_ns: tuple[tuple[int, int], ...] = ()


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """The trace. launches: retired ones, oldest first. waits: begin and end of the loop's waits for marks or arrivals,
    in seconds on the engine's clock, oldest first; at most as far back as the launches.
    """

    launches: tuple[LaunchTimes, ...]
    waits: tuple[tuple[float, float], ...]
