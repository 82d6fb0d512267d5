"""Figures of the engine and of the front end are the contract's: each goes into one field, and none is left empty."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from runahead.runtime.wire.figures import EngineStats, EventStats, HistogramStats
from runahead.service.shared_memory.board import FrontEndCounters, ProcessFigures
from runahead.service.stats.stats import server_stats
from runahead.v1 import FrontEndStats, HeldStats, ProcessStats, ServerStats
from tests.service.fake_engine import STATS

NOTHING: dict[str, Any] = {"held": HeldStats()}


def numbered(first: int) -> tuple[EngineStats, FrontEndCounters, dict[str, Any], int]:
    """Figures of which each has a value of its own, those inside maps and structs too: `first` and so on. And how many
    there are."""
    numbers = itertools.count(first)

    def renumbered(value: object) -> object:
        if isinstance(value, int | float):
            return type(value)(next(numbers))
        if isinstance(value, EventStats):
            return EventStats(*(next(numbers) for _ in value.__struct_fields__))
        if isinstance(value, HistogramStats):
            return HistogramStats([next(numbers) for _ in value.counts], float(next(numbers)))
        assert isinstance(value, dict) and value, "a figure without a value shows nothing"
        return {key: renumbered(inner) for key, inner in value.items()}

    stats = EngineStats(**{name: renumbered(getattr(STATS, name)) for name in STATS.__struct_fields__})  # type: ignore[arg-type]
    counters = FrontEndCounters(*(next(numbers) for _ in fields(FrontEndCounters)))
    process = ProcessFigures("engine", *(next(numbers) for _ in range(4)))
    held = HeldStats(**{field.name: next(numbers) for field in HeldStats.DESCRIPTOR.fields})
    service: dict[str, Any] = {"version": "0.1.0", "server_id": "server-1", "held": held}
    service |= {"connections": next(numbers), "refusals": {"NO_RIGHT": next(numbers)}}
    service |= {"processes": [ProcessStats(**asdict(process))]}
    return stats, counters, service, next(numbers) - first


def empty_fields(message: Any, path: str) -> Iterator[str]:
    """Fields without a value, inside other messages and maps too, by their paths."""
    for field in message.DESCRIPTOR.fields:
        here, value = f"{path}.{field.name}", getattr(message, field.name)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            if not value:
                yield here
        elif field.is_repeated and not field.message_type.GetOptions().map_entry:
            if not value:
                yield here
            for entry in value:
                yield from empty_fields(entry, here)
        elif field.is_repeated:  # a map
            if not value:
                yield here
            if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_MESSAGE:
                for entry in value.values():
                    yield from empty_fields(entry, here)
            elif not all(value.values()):
                yield here
        else:
            yield from empty_fields(value, here)


@pytest.mark.parametrize("first", [1001, (1 << 31) - 20, (1 << 32) - 20, 1 << 50])
def test_every_figure_is_served_whatever_its_size(first: int) -> None:
    """All are found in the message."""
    stats, counters, service, count = numbered(first)
    message = str(server_stats(stats, counters, **service))
    served = {float(text) for text in re.findall(r": ([\d.e+]+)\n", message)}  # exact: all are below 2^53
    assert [number for number in range(first, first + count) if number not in served] == []


def test_every_field_of_the_contract_has_a_figure() -> None:
    stats, counters, service, _ = numbered(1)
    assert list(empty_fields(server_stats(stats, counters, **service), "stats")) == []


def test_a_field_without_a_figure_would_be_found() -> None:
    message = server_stats(STATS, FrontEndCounters(), **NOTHING)
    empty = set(empty_fields(message, "stats"))
    assert {"stats.version", "stats.processes", "stats.connections"} <= empty
    assert {"stats.front_end.refused", "stats.graphs.captures", "stats.inter_token_s.p50"} <= empty
    assert not {"stats.chain.launches", "stats.barriers.seconds", "stats.lifecycle.events.held"} & empty
    everything = set(empty_fields(ServerStats(), "stats"))
    assert {"stats.barriers", "stats.first_token_histogram.bounds_s", "stats.lifecycle.events"} <= everything


def test_the_front_end_s_counters_are_the_fields_of_the_contract() -> None:
    declared = [field.name for field in fields(FrontEndCounters)]
    assert declared == [field.name for field in FrontEndStats.DESCRIPTOR.fields]


def test_a_group_without_a_figure_is_there_all_the_same() -> None:
    """Clients may ask whether a group is set."""
    times = ("first_token", "inter_token", "queue", "end_to_end")
    figures: dict[str, Any] = {
        name: type(getattr(STATS, name))() for name in STATS.__struct_fields__ if name not in times
    }
    figures |= dict.fromkeys(times, HistogramStats([0], 0.0))
    stats = EngineStats(**figures)
    message = server_stats(stats, FrontEndCounters(), **NOTHING)
    groups = [field.name for field in ServerStats.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_MESSAGE]
    lists = {"barriers", "processes", "refusals"}
    assert {name for name in groups if name not in lists and not message.HasField(name)} == set()
    assert message.requests.submitted == 0 and not message.barriers
