"""`Trace`: times of the newest launches on host and device, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from runahead.runtime.wire.figures import MAX_TRACED, LaunchTimes
from runahead.runtime.wire.figures import Trace as EngineTrace
from runahead.service.contract.errors import Violation, invalid_argument
from runahead.service.contract.validation import check_known
from runahead.service.engine.engine_client import SocketEngineClient
from runahead.v1 import LaunchTrace, TimeSpan, TraceRequest, TraceResponse

_DEFAULT: Final = 100


async def trace(engine: SocketEngineClient, request: TraceRequest) -> TraceResponse:
    """Answer `Trace`. Raises ServiceError (INVALID_ARGUMENT), and EngineLostError, also at once if the engine is
    silent.
    """
    check_known(request)
    launches = request.launches if request.HasField("launches") else _DEFAULT
    if not 1 <= launches <= MAX_TRACED:
        sentence = f"launches must be 1 to {MAX_TRACED}, and is {launches}"
        raise invalid_argument([Violation("launches", sentence)])
    return as_response(await engine.trace(launches), shares_clock=engine.info.device == "cpu")


def as_response(traced: EngineTrace, *, shares_clock: bool) -> TraceResponse:
    """Make the response. shares_clock: the device uses the host's clock."""
    if not traced.launches:
        return TraceResponse()
    count = len(traced.launches[0].other_ranks_ns)
    clocks = [(0, 0) if shares_clock else device_clock(traced.launches, rank) for rank in range(1 + count)]
    (offset_ns, _), *others = clocks
    zero_ns = min(_ns(begin) for begin in (traced.launches[0].plan_s, *(begin for begin, _ in traced.waits)))

    def span(begin_ns: int, end_ns: int) -> TimeSpan:
        return TimeSpan(begin=_duration(begin_ns - zero_ns), end=_duration(end_ns - zero_ns))

    def host(begin_s: float, end_s: float) -> TimeSpan:
        return span(_ns(begin_s), _ns(end_s))

    return TraceResponse(
        launches=[
            LaunchTrace(
                number=times.number,
                kind=times.kind,
                rows=times.rows,
                prompt_tokens=times.prompt_tokens,
                overlapped=times.overlapped,
                first_after_idle=times.first,
                plan=host(times.plan_s, times.stage_s),
                stage=host(times.stage_s, times.launch_s),
                launch=host(times.launch_s, times.enqueued_s),
                commit=host(times.commit_s, times.publish_s),
                publish=host(times.publish_s, times.published_s),
                device=span(times.start_ns + offset_ns, times.end_ns + offset_ns),
                idle_inside=_duration(times.idle_inside_ns),
                other_ranks=[
                    span(start_ns + offset, end_ns + offset)
                    for (start_ns, end_ns), (offset, _) in zip(times.other_ranks_ns, others, strict=True)
                ],
            )
            for times in traced.launches
        ],
        waits=[host(*wait) for wait in traced.waits],
        clock_slack=_duration(max(slack for _, slack in clocks)),
    )


def device_clock(launches: Sequence[LaunchTimes], rank: int = 0) -> tuple[int, int]:
    """Return the offset from a rank's device clock to the host's in nanoseconds, and its uncertainty.

    A launch starts after the host's call and ends before the host sees its mark: the offset is the middle of the
    interval that all launches allow. If the clocks have drifted the interval is empty, and the uncertainty is the size
    of the contradiction.
    """
    spans = [((times.start_ns, times.end_ns), *times.other_ranks_ns)[rank] for times in launches]
    least = max(_ns(times.launch_s) - start_ns for times, (start_ns, _) in zip(launches, spans, strict=True))
    most = min(_ns(times.ended_s) - end_ns for times, (_, end_ns) in zip(launches, spans, strict=True))
    return (least + most) // 2, abs(most - least) // 2


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration
