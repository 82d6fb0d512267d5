"""What an engine remembers of its newest launches, as it tells its front ends in a `TraceReply`."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_TRACED: Final = 256  # launches that are remembered


class LaunchTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When what happened to a launch. `_s`: seconds on the engine's clock; `_ns`: nanoseconds on the device's.

    kind: decode, mixed or closing. rows, prompt_tokens: of its F. overlapped, first: as of `Launch`. The host planned
    it from plan_s on, staged the plan from stage_s, and called the device from launch_s to enqueued_s. It had seen the
    tokens and committed them from commit_s on, and sent them from publish_s to published_s. ended_s: the look that
    found F ended. idle_inside_ns: within the launch, between its pieces. other_ranks_ns: from rank 1 on,
    start and end on the clock of the rank's device.
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
    """launches: that have retired, oldest first. waits: when the loop waited for marks or arrivals, from and to, in
    seconds on the engine's clock, oldest first; as far back as the launches go, or less."""

    launches: tuple[LaunchTimes, ...]
    waits: tuple[tuple[float, float], ...]
