"""A `TraceResponse` in microseconds from its first moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration

from runahead.v1 import trace_pb2

STAGES: Final = ("plan", "stage", "launch", "commit", "publish")  # of the host's work for a launch

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimedLaunch:
    """A launch like the contract's `LaunchTrace`. A span has begin and end in microseconds. other_ranks: spans of the
    further ranks.
    """

    number: int
    kind: str
    rows: int
    prompt_tokens: int
    overlapped: bool
    first_after_idle: bool
    plan: Span
    stage: Span
    launch: Span
    commit: Span
    publish: Span
    device: Span
    idle_inside_us: float
    other_ranks: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline. launches: oldest first. waits: the host's. slack_us: uncertainty of the device's clock."""

    launches: tuple[TimedLaunch, ...]
    waits: tuple[Span, ...]
    slack_us: float


def timeline_of(response: trace_pb2.TraceResponse) -> Timeline:
    """Convert a response to plain numbers."""
    return Timeline(
        tuple(
            TimedLaunch(
                launch.number,
                launch.kind,
                launch.rows,
                launch.prompt_tokens,
                launch.overlapped,
                launch.first_after_idle,
                _span(launch.plan),
                _span(launch.stage),
                _span(launch.launch),
                _span(launch.commit),
                _span(launch.publish),
                _span(launch.device),
                _us(launch.idle_inside),
                tuple(map(_span, launch.other_ranks)),
            )
            for launch in response.launches
        ),
        tuple(map(_span, response.waits)),
        _us(response.clock_slack),
    )


def _span(span: trace_pb2.TimeSpan) -> Span:
    return _us(span.begin), _us(span.end)


def _us(duration: Duration) -> float:
    return duration.seconds * 1e6 + duration.nanos / 1e3
