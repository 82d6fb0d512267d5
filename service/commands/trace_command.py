"""`runahead trace`: shows the newest launches on host and device as figures, a timeline and a picture, or exports them
for Perfetto and chrome://tracing in Chrome's Trace Event Format (JSON object format).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from runahead.service.commands.chain_picture import STAGES, duration_us, idle_us, picture, span_us, step_us
from runahead.service.commands.client import add_timeout_flag, one_call
from runahead.service.commands.ends import EXIT_FAILED
from runahead.service.commands.request_flags import UsageError
from runahead.v1 import trace_pb2

_PROCESS: Final = 1
_HOST, _DEVICE, _TOKENS = 1, 2, 3  # thread ids of the lanes


def chrome_trace(timeline: trace_pb2.TraceResponse) -> dict[str, Any]:
    """Make lanes of the host's work, the device's launches and the host's view of tokens, and one for each further
    tensor-parallel rank. Arrows connect a launch's enqueue with its run.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", 0, "runahead"),
        _name("thread_name", _HOST, "host"),
        _name("thread_name", _DEVICE, "device"),
        _name("thread_name", _TOKENS, "tokens seen"),
    ]
    ranks = max((len(launch.other_ranks) for launch in timeline.launches), default=0)
    events += (_name("thread_name", _TOKENS + rank, f"device of rank {rank}") for rank in range(1, 1 + ranks))
    events += (_slice(_HOST, "wait", wait, {}) for wait in timeline.waits)
    for launch in timeline.launches:
        facts = {
            "launch": launch.number,
            "rows": launch.rows,
            "prompt_tokens": launch.prompt_tokens,
            "overlapped": launch.overlapped,
        }
        events += (_slice(_HOST, stage, getattr(launch, stage), {"launch": launch.number}) for stage in STAGES)
        idle = {"idle_inside_us": duration_us(launch.idle_inside)}
        events.append(_slice(_DEVICE, f"{launch.kind} {launch.number}", launch.device, facts | idle))
        for rank, span in enumerate(launch.other_ranks, start=1):
            events.append(_slice(_TOKENS + rank, f"{launch.kind} {launch.number}", span, {"launch": launch.number}))
        tokens = {"ph": "i", "s": "t", "name": f"tokens {launch.number}", "ts": duration_us(launch.commit.begin)}
        events.append(tokens | {"pid": _PROCESS, "tid": _TOKENS, "args": facts})
        arrow = {"cat": "enqueued", "name": "enqueued", "id": launch.number, "pid": _PROCESS}
        events.append(arrow | {"ph": "s", "ts": duration_us(launch.launch.end), "tid": _HOST})
        events.append(arrow | {"ph": "f", "bp": "e", "ts": duration_us(launch.device.begin), "tid": _DEVICE})
    slack = {"clock_slack_us": duration_us(timeline.clock_slack)}
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": slack}


def _name(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": {"name": name}}


def _slice(lane: int, name: str, span: trace_pb2.TimeSpan, facts: dict[str, Any]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "ts": duration_us(span.begin), "dur": _length(span), "pid": _PROCESS, "tid": lane}
    return event | {"args": facts} if facts else event


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of the number of launches and the outputs."""
    parser.add_argument("--launches", metavar="N", help="of the newest launches, so many, 1 to 256 (default: 100)")
    parser.add_argument("--each", action="store_true", help="a line for each launch, with its idle time, oldest first")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="write a picture of some launches, as SVG")
    add_timeout_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print figures and write the requested files. Returns the exit status.

    0: done. 1: the call failed, no launch was made yet, or a file can't be written. 2: a flag is invalid. 130:
    interrupted.
    """
    return _show(one_call(arguments, _request(arguments), lambda stub: stub.Trace), arguments)


def _show(timeline: trace_pb2.TraceResponse, arguments: argparse.Namespace) -> int:
    if not timeline.launches:
        print("runahead trace: no launch was made yet", file=sys.stderr)
        return EXIT_FAILED
    print("\n".join([*(each_launch(timeline) if arguments.each else ()), *figures(timeline)]), flush=True)
    made: list[tuple[Path, str]] = []
    if arguments.out is not None:
        made.append((arguments.out, json.dumps(chrome_trace(timeline)) + "\n"))
    if arguments.picture is not None:
        made.append((arguments.picture, picture([(arguments.url, timeline)])))
    for path, text in made:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:  # a full disk's error names no file
            print(f"runahead trace: {path} can't be written: {error.strerror}", file=sys.stderr)
            return EXIT_FAILED
    return 0


def figures(timeline: trace_pb2.TraceResponse) -> list[str]:
    """Return a line for each figure, for a timeline with launches."""
    launches = timeline.launches
    chained = [(before, after) for before, after in pairwise(launches) if not after.first_after_idle]
    late_us = [
        duration_us(after.launch.end) - duration_us(before.device.end)
        for before, after in chained
        if not after.overlapped
    ]
    return [
        f"launches  {launches[0].number} to {launches[-1].number}: "
        + ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(each.kind for each in launches).items())),
        f"overlap   {len(chained) - len(late_us)} of {len(chained)} that could were enqueued while the one before ran"
        + (f", the others up to {max(late_us):.1f} µs after its end" if late_us else ""),
        "step      " + _spread([step_us(before, after) for before, after in chained]),
        "idle      " + _spread([idle_us(before, after) for before, after in chained])
        + " between two launches",
        *(_of_kind(kind, launches) for kind in sorted({each.kind for each in launches})),
        *(f"{stage:<10}" + _spread([_length(getattr(launch, stage)) for launch in launches]) for stage in STAGES),
        f"clocks    the device's side is right within {duration_us(timeline.clock_slack):.1f} µs",
    ]  # fmt: skip


def each_launch(timeline: trace_pb2.TraceResponse) -> list[str]:
    """Return a table of launches: kind, run time, idle time before it, and an upper bound of idle time inside it."""
    lines = [f"{'launch':>10}  {'kind':<8}{'rows':>5}{'prompt':>8}{'device µs':>11}{'idle before':>13}{'inside':>9}"]
    before: trace_pb2.LaunchTrace | None = None
    for launch in timeline.launches:
        idle = "-" if before is None or launch.first_after_idle else f"{idle_us(before, launch):.1f}"
        lines.append(
            f"{launch.number:>10}  {launch.kind:<8}{launch.rows:>5}{launch.prompt_tokens:>8}"
            f"{_length(launch.device):>11.1f}{idle:>13}{duration_us(launch.idle_inside):>9.1f}"
        )
        before = launch
    return lines


def _of_kind(kind: str, launches: Sequence[trace_pb2.LaunchTrace]) -> str:
    """Describe the idle part of the device's time with launches of a kind, before and inside them."""
    inside = sum(duration_us(each.idle_inside) for each in launches if each.kind == kind)
    busy = sum(_length(each.device) for each in launches if each.kind == kind)
    pairs = [(one, other) for one, other in pairwise(launches) if other.kind == kind and not other.first_after_idle]
    between = sum(idle_us(one, other) for one, other in pairs)
    fraction = 100 * (between + inside) / max(busy + between, 1e-9)
    of = f"of {busy + between:.0f} µs: {fraction:.1f} %"
    return f"  {kind:<8}{between:.0f} µs before and at most {inside:.0f} µs inside, {of}"


def _length(span: trace_pb2.TimeSpan) -> float:
    begin, end = span_us(span)
    return end - begin


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    return f"{statistics.median(values):.1f} µs in the median, {max(values):.1f} at most"


def _request(arguments: argparse.Namespace) -> trace_pb2.TraceRequest:
    """Make the request. Raises UsageError."""
    if arguments.launches is None:
        return trace_pb2.TraceRequest()
    try:
        return trace_pb2.TraceRequest(launches=int(arguments.launches))
    except ValueError as error:
        raise UsageError(f"--launches {arguments.launches} is not a number of launches") from error
