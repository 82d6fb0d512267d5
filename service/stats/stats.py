"""Makes `ServerStats` from the figures of the engine, the front ends and the service.

A figure has the same name on both sides, or its group's beside it in the engine: `tokens.void_rows` is `void_rows`,
`blocks.free` is `blocks_free` and `tokens.cached` is `cached_tokens`. `_OTHER_NAMES` has the exceptions, and
`server_stats` computes derived figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from runahead.runtime.wire.figures import EngineStats, HistogramStats
from runahead.runtime.wire.histogram import BOUNDS_S, quantile
from runahead.service.shared_memory.board import FrontEndCounters
from runahead.v1 import BarrierStats, FrontEndStats, Histogram, Quantiles, ServerStats

_OTHER_NAMES: Final = {"graphs.captures": "graph_captures", "graphs.replays": "graph_replays"}
_GROUPS: Final = (
    "requests",
    "tokens",
    "blocks",
    "snapshots",
    "rows",
    "penalty_slots",
    "chain",
    "graphs",
    "lifecycle",
    "masks",
)
_CONTRACT: Final[Any] = ServerStats.DESCRIPTOR  # its class depends on protobuf's implementation


def _engine_name(group: str, figure: str) -> str:
    """Return the engine's name of a contract's figure."""
    if other := _OTHER_NAMES.get(f"{group}.{figure}"):
        return other
    names = {figure, f"{group}_{figure}", f"{figure}_{group}"} & set(EngineStats.__struct_fields__)
    assert len(names) == 1, f"{group}.{figure} of the contract is one field of EngineStats, and not {sorted(names)}"
    return names.pop()


_NAMES: Final[dict[str, dict[str, str]]] = {
    group: {
        figure.name: _engine_name(group, figure.name) for figure in _CONTRACT.fields_by_name[group].message_type.fields
    }
    for group in _GROUPS
}


def server_stats(engine: EngineStats, counters: FrontEndCounters, **service: Any) -> ServerStats:
    """Make `ServerStats`. service: fields counted by neither the engine nor a front end."""
    stats = ServerStats(
        uptime_s=engine.uptime_s,
        barriers={
            reason: BarrierStats(count=count, seconds=engine.barrier_s.get(reason, 0.0))
            for reason, count in engine.barriers.items()
        },
        first_token_s=_quantiles(engine.first_token),
        inter_token_s=_quantiles(engine.inter_token),
        first_token_histogram=_histogram(engine.first_token),
        inter_token_histogram=_histogram(engine.inter_token),
        queue_histogram=_histogram(engine.queue),
        end_to_end_histogram=_histogram(engine.end_to_end),
        front_end=FrontEndStats(**asdict(counters)),
        **service,
    )
    for group, names in _NAMES.items():
        message = getattr(stats, group)
        message.SetInParent()
        for figure, name in names.items():
            _set(message, figure, getattr(engine, name))
    return stats


def _set(message: Any, figure: str, value: object) -> None:
    """Set a figure. value: a number, or numbers or structs by key."""
    if not isinstance(value, Mapping):
        setattr(message, figure, value)
        return
    entries = getattr(message, figure)
    for key, inner in value.items():
        if not isinstance(inner, msgspec.Struct):
            entries[key] = inner
            continue
        entries[key].SetInParent()
        for name, number in msgspec.structs.asdict(inner).items():
            setattr(entries[key], name, number)


def _quantiles(times: HistogramStats) -> Quantiles:
    """Return quantiles, None without a measurement."""
    if not any(times.counts):
        return Quantiles()
    return Quantiles(p50=quantile(times.counts, 0.5), p90=quantile(times.counts, 0.9), p99=quantile(times.counts, 0.99))


def _histogram(times: HistogramStats) -> Histogram:
    return Histogram(bounds_s=BOUNDS_S, counts=times.counts, count=sum(times.counts), sum_s=times.sum_s)
