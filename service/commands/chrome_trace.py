"""Exports a timeline for Perfetto and chrome://tracing in Chrome's Trace Event Format (JSON object format)."""

from __future__ import annotations

from typing import Any, Final

from runahead.service.commands.timeline import STAGES, Span, Timeline

_PROCESS: Final = 1
_HOST, _DEVICE, _TOKENS = 1, 2, 3  # thread ids of the lanes


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
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
        idle = {"idle_inside_us": round(launch.idle_inside_us, 3)}
        events.append(_slice(_DEVICE, f"{launch.kind} {launch.number}", launch.device, facts | idle))
        for rank, span in enumerate(launch.other_ranks, start=1):
            events.append(_slice(_TOKENS + rank, f"{launch.kind} {launch.number}", span, {"launch": launch.number}))
        tokens = {"ph": "i", "s": "t", "name": f"tokens {launch.number}", "ts": launch.commit[0], "args": facts}
        events.append(tokens | {"pid": _PROCESS, "tid": _TOKENS})
        arrow = {"cat": "enqueued", "name": "enqueued", "id": launch.number, "pid": _PROCESS}
        events.append(arrow | {"ph": "s", "ts": launch.launch[1], "tid": _HOST})
        events.append(arrow | {"ph": "f", "bp": "e", "ts": launch.device[0], "tid": _DEVICE})
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": {"clock_slack_us": timeline.slack_us}}


def _name(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": {"name": name}}


def _slice(lane: int, name: str, span: Span, facts: dict[str, Any]) -> dict[str, Any]:
    begin, end = span
    event = {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": _PROCESS, "tid": lane}
    return event | {"args": facts} if facts else event
