"""Draws launches of one timeline, or of several to one scale, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, repeat
from operator import mul
from typing import Final
from xml.sax.saxutils import escape

from google.protobuf.duration_pb2 import Duration

from runahead.v1 import trace_pb2

STAGES: Final = ("plan", "stage", "launch", "commit", "publish")  # of the host's work for a launch
Span = tuple[float, float]

SHOWN: Final = 5  # launches of the slowest panel
WIDTH: Final = 960
LEFT: Final = 110
_PANEL: Final = 164
_LANE: Final = 34  # of a panel's height, for each further rank
_LETTER: Final = 8.0  # width of the widest character in pixels, about
_GAP: Final = 6.0  # between two labels
_IN_MS: Final = 100_000.0  # microseconds of a picture from which times are in milliseconds
_HOST, _DEVICE, _IDLE, _INK = "#4c78a8", "#59a14f", "#e15759", "#222222"


def picture(panels: Sequence[tuple[str, trace_pb2.TraceResponse]]) -> str:
    """Draw a panel for each timeline, by name, with the launches whose steps are closest to the median.

    A timeline has at least one launch.
    """
    shown = [(name, timeline, _typical(timeline.launches)) for name, timeline in panels]
    span = max(duration_us(launches[-1].device.end) - duration_us(launches[0].device.begin) for _, _, launches in shown)
    scale = (WIDTH - LEFT - 20) / span
    tops = [*accumulate((_PANEL + _LANE * len(launches[0].other_ranks) for _, _, launches in shown), initial=20)]
    end = tops[-1]
    drawing = _Drawing(end + 48)
    for top, (name, timeline, launches) in zip(tops, shown, strict=False):
        _draw_panel(drawing, name, timeline, duration_us(launches[0].device.begin), top, span, scale)
    for tick in range(0, int(span), _tick(span)):
        drawing.line(LEFT + tick * scale, end - 12, LEFT + tick * scale, end - 6)
        drawing.text(LEFT + tick * scale, end + 8, _time(tick, span), anchor="middle")
    _draw_legend(drawing, end + 34)
    return str(drawing)


def _draw_legend(drawing: _Drawing, y: float) -> None:
    """Draw the legend in one line. y: of its text's baseline."""
    x = 10.0
    for colour, words in ((_HOST, "host at work"), (_DEVICE, "device runs a launch"), (_IDLE, "device is idle")):
        drawing.bar(x, y - 11, 14, 12, colour, words)
        drawing.text(x + 20, y, words)
        x += 32 + len(words) * _LETTER
    drawing.line(x + 2, y - 12, x + 12, y + 2)
    words = "launch N: enqueued, begins"
    drawing.text(x + 20, y, words)
    x += 32 + len(words) * _LETTER
    drawing.mark(x + 6, y - 9, "tokens are seen")
    drawing.text(x + 20, y, "its tokens reach the host")


def _time(microseconds: float, span: float, digits: int = 0) -> str:
    """Format a time in the unit for a picture of `span` microseconds. digits: decimals of microseconds."""
    if span >= _IN_MS:
        return f"{microseconds / 1e3:.{digits + 1}f}".removesuffix(".0") + " ms"
    return f"{microseconds:.{digits}f} µs"


def _typical(launches: Sequence[trace_pb2.LaunchTrace]) -> Sequence[trace_pb2.LaunchTrace]:
    """Choose at most SHOWN consecutive launches whose worst step is nearest to the median."""
    steps = [step_us(before, after) for before, after in pairwise(launches)]
    if len(launches) <= SHOWN:
        return launches
    median = statistics.median(steps)
    off = [max(abs(step - median) for step in steps[at : at + SHOWN - 1]) for at in range(len(launches) - SHOWN + 1)]
    first = off.index(min(off))
    return launches[first : first + SHOWN]


def _tick(span: float) -> int:
    """Return the microseconds between ticks, 1, 2 or 5 times a power of ten, for at most ten ticks."""
    steps = (step * power for power in accumulate(repeat(10), mul, initial=1) for step in (1, 2, 5))
    return next(step for step in steps if span / step <= 10)


def _work(waits: Sequence[trace_pb2.TimeSpan]) -> Iterator[Span]:
    """Yield the host's working times, between its first and last wait."""
    for before, after in pairwise(waits):
        yield duration_us(before.end), duration_us(after.begin)


def _draw_panel(
    drawing: _Drawing, name: str, timeline: trace_pb2.TraceResponse, zero: float, top: float, span: float, scale: float
) -> None:
    host, device, height = top + 42, top + 98, 26

    def x(at: float) -> float:
        return LEFT + (at - zero) * scale

    def bar(begin: float, end: float, y: float, colour: str, title: str) -> None:
        begin, end = max(begin, zero), min(end, zero + span)
        if begin < end:
            drawing.bar(x(begin), y, (end - begin) * scale, height, colour, title)

    drawing.text(10, top + 10, f"{name}: {_heading(timeline.launches, span)}")
    drawing.text(10, host + 18, "host at work")
    drawing.text(10, device + 18, "device")
    for begin, end in _work(timeline.waits):
        bar(begin, end, host, _HOST, _time(end - begin, span))
    labelled_to = float(LEFT)  # right end of the labels above the host's bar
    for launch in timeline.launches:
        begin, end = span_us(launch.device)
        width = len(str(launch.number)) * _LETTER
        bar(begin, end, device, _DEVICE, f"{launch.kind} launch {launch.number}: {_time(end - begin, span)}")
        if zero <= begin and end <= zero + span and (end - begin) * scale >= width:
            drawing.text((x(begin) + x(end)) / 2, device + 18, str(launch.number), colour="#ffffff", anchor="middle")
        enqueued, tokens = duration_us(launch.launch.end), duration_us(launch.commit.begin)
        if zero <= enqueued <= zero + span:
            drawing.line(x(enqueued), host - 4, x(enqueued), host + height)
            if x(enqueued) - width / 2 >= labelled_to:
                drawing.text(x(enqueued), host - 7, str(launch.number), anchor="middle")
                labelled_to = x(enqueued) + width / 2 + _GAP
            if zero <= begin <= zero + span:
                drawing.line(x(enqueued), host + height, x(begin), device)
        if zero <= tokens <= zero + span:
            drawing.mark(x(tokens), host + height, f"tokens of launch {launch.number} are seen")
    for before, after in pairwise(timeline.launches):
        begin, end = duration_us(before.device.end), duration_us(after.device.begin)
        bar(begin, end, device, _IDLE, f"idle: {_time(end - begin, span, 1)}")
    for rank in range(1, 1 + len(timeline.launches[0].other_ranks)):
        drawing.text(10, device + _LANE * rank + 18, f"rank {rank}")
        for launch in timeline.launches:
            begin, end = span_us(launch.other_ranks[rank - 1])
            title = f"{launch.kind} launch {launch.number} on rank {rank}: {_time(end - begin, span)}"
            bar(begin, end, device + _LANE * rank, _DEVICE, title)


def _heading(launches: Sequence[trace_pb2.LaunchTrace], span: float) -> str:
    pairs = [(before, after) for before, after in pairwise(launches) if not after.first_after_idle]
    if not pairs:
        return f"launch {launches[0].number}"
    step = statistics.median(step_us(before, after) for before, after in pairs)
    idle = statistics.median(idle_us(before, after) for before, after in pairs)
    return f"a step takes {_time(step, span)}, the device is idle for {_time(idle, span)} of it"


class _Drawing:
    """SVG elements in order."""

    def __init__(self, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]

    def bar(self, x: float, y: float, width: float, height: float, colour: str, title: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_INK}" stroke-width="0.8"/>'
        )

    def text(self, x: float, y: float, text: str, *, colour: str = _INK, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>')

    def mark(self, x: float, y: float, title: str) -> None:
        """Draw a small triangle that points up at (x, y)."""
        points = f"{x:.1f},{y:.1f} {x - 4:.1f},{y + 8:.1f} {x + 4:.1f},{y + 8:.1f}"
        self.parts.append(f'<polygon points="{points}" fill="{_INK}"><title>{escape(title)}</title></polygon>')

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def span_us(span: trace_pb2.TimeSpan) -> Span:
    """Return begin and end in microseconds."""
    return duration_us(span.begin), duration_us(span.end)


def duration_us(duration: Duration) -> float:
    """Return a duration in microseconds."""
    return duration.ToNanoseconds() / 1e3


def step_us(before: trace_pb2.LaunchTrace, after: trace_pb2.LaunchTrace) -> float:
    """Return the microseconds from a launch's begin on the device to the next one's."""
    return duration_us(after.device.begin) - duration_us(before.device.begin)


def idle_us(before: trace_pb2.LaunchTrace, after: trace_pb2.LaunchTrace) -> float:
    """Return the microseconds for which the device was idle between two launches."""
    return max(0.0, duration_us(after.device.begin) - duration_us(before.device.end))
