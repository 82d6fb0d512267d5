"""Figures of the engine and of the front end are the contract's: each goes into one field, and none is left empty."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from runahead.runtime.wire import messages as m
from runahead.service.board import FrontEndCounters
from runahead.service.stats import server_stats
from runahead.v1 import FrontEndStats, ServerStats
from tests.service.fake_engine import STATS


def numbered(first: int) -> tuple[m.EngineStats, FrontEndCounters, int]:
    """Figures of which each has a value of its own, those inside maps and structs too: `first` and so on. And how many
    there are."""
    numbers = itertools.count(first)

    def renumbered(value: object) -> object:
        if isinstance(value, int | float):
            return type(value)(next(numbers))
        if isinstance(value, m.EventStats):
            return m.EventStats(*(next(numbers) for _ in value.__struct_fields__))
        if isinstance(value, m.HistogramStats):
            return m.HistogramStats([next(numbers) for _ in value.counts], float(next(numbers)))
        assert isinstance(value, dict) and value, "a figure without a value shows nothing"
        return {key: renumbered(inner) for key, inner in value.items()}

    stats = m.EngineStats(**{name: renumbered(getattr(STATS, name)) for name in STATS.__struct_fields__})  # type: ignore[arg-type]
    counters = FrontEndCounters(*(next(numbers) for _ in fields(FrontEndCounters)))
    return stats, counters, next(numbers) - first


def empty_fields(message: Any, path: str) -> Iterator[str]:
    """Fields without a value, inside other messages and maps too, by their paths."""
    for field in message.DESCRIPTOR.fields:
        here, value = f"{path}.{field.name}", getattr(message, field.name)
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            if not value:
                yield here
        elif field.is_repeated:  # a map: no other message is repeated here
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
    stats, counters, count = numbered(first)
    message = str(server_stats(stats, counters))
    served = {float(text) for text in re.findall(r": ([\d.e+]+)\n", message)}  # exact: all are below 2^53
    assert [number for number in range(first, first + count) if number not in served] == []


def test_every_field_of_the_contract_has_a_figure() -> None:
    stats, counters, _ = numbered(1)
    assert list(empty_fields(server_stats(stats, counters), "stats")) == []


def test_a_field_without_a_figure_would_be_found() -> None:
    message = server_stats(STATS, FrontEndCounters())
    empty = set(empty_fields(message, "stats"))
    assert {"stats.front_end.refused", "stats.graphs.captures", "stats.inter_token_s.p50"} <= empty
    assert not {"stats.chain.launches", "stats.barriers.seconds", "stats.lifecycle.events.held"} & empty
    everything = set(empty_fields(ServerStats(), "stats"))
    assert {"stats.barriers", "stats.first_token_histogram.bounds_s", "stats.lifecycle.events"} <= everything


def test_the_front_end_s_counters_are_the_fields_of_the_contract() -> None:
    declared = [field.name for field in fields(FrontEndCounters)]
    assert declared == [field.name for field in FrontEndStats.DESCRIPTOR.fields]


def test_a_group_without_a_figure_is_there_all_the_same() -> None:
    """Clients may ask whether a group is set."""
    nothing = {name: type(getattr(STATS, name))() for name in STATS.__struct_fields__ if name[-6:] != "_token"}
    none = m.HistogramStats([0], 0.0)
    stats = m.EngineStats(**nothing, first_token=none, inter_token=none)
    message = server_stats(stats, FrontEndCounters())
    groups = [field.name for field in ServerStats.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_MESSAGE]
    assert {name for name in groups if name != "barriers" and not message.HasField(name)} == set()
    assert message.requests.submitted == 0 and not message.barriers
