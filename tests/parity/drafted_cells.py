"""A cell of the matrix on services that draft: every depth has the answers of one in `serial` that drafts nothing, and
what the cell is about happens at every depth.

In a cell of structured requests masks are late from the beginning until every service has held a row for want of one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from runahead.v1 import ServerStats
from tests.parity.comparing import compare
from tests.parity.figures import check_at_rest, drafts_by_place, grown
from tests.parity.matrix import EVENTS, Run, saw_depth, saw_kind, workload_of
from tests.parity.services import figures_everywhere, run_everywhere
from tests.parity.stopped_workers import run_with_late_masks
from tests.parity.structures import fits, is_structured, structured
from tests.parity.test_parity import ATTEMPTS, BARRIER_INTERVAL, table

FIRST_ATTEMPT: Final = 50
WITHOUT: Final = "without"


@dataclass(frozen=True, slots=True)
class Cell:
    """kind: of its requests. is_structured: two of three of them have a structure."""

    kind: str
    event: str
    is_structured: bool = False

    def __str__(self) -> str:
        return f"{self.kind} / {self.event}{', structured' if self.is_structured else ''}"


@dataclass(frozen=True, slots=True)
class Services:
    """Those of a cell. urls: by depth, of services that draft. without: of the one that drafts nothing. drafts: of a
    launch, as it was asked for."""

    pool: str
    drafter: str
    drafts: str
    urls: Mapping[str, str]
    without: str

    def __str__(self) -> str:
        return f"{self.drafter}, {self.drafts} drafts"


def check_cell(cell: Cell, services: Services) -> None:
    """Once more with other prompts where what it is about did not happen at every depth. Raises AssertionError."""
    assert EVENTS[cell.event].pool == services.pool
    for attempt in range(FIRST_ATTEMPT, FIRST_ATTEMPT + ATTEMPTS):
        seen = _attempted(cell, services, attempt)
        print(f"\n{cell}, {services}: " + table(seen))
        if all(count > 0 for happened in seen for count in happened.values()):
            return
    raise AssertionError(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")


def _attempted(cell: Cell, services: Services, attempt: int) -> list[dict[str, int]]:
    """What was seen at each depth, by name."""
    asked = workload_of(cell.kind, cell.event, attempt, uneven=cell.is_structured)
    if cell.is_structured:
        kinds = structured(asked, ends=cell.event in ("end-of-sequence", "prefix-hit"))
        assert len(kinds) == 3, "structured rows beside plain ones"
    run = run_with_late_masks if cell.is_structured else run_everywhere
    urls = {**services.urls, WITHOUT: services.without}
    before = asyncio.run(figures_everywhere(urls))
    answers = asyncio.run(run(urls, asked))
    after = asyncio.run(figures_everywhere(urls))
    runs = {d: Run(cell.kind, d, asked, answers[d], grown(before[d], after[d])) for d in urls}
    assert not runs[WITHOUT].counted["drafts kept"] and not any(sum(answer.drafts or ()) for answer in answers[WITHOUT])
    for depth, one in runs.items():
        where = f"{cell}, {services}, depth {depth}"
        check_at_rest(after[depth], 0 if depth == WITHOUT else BARRIER_INTERVAL[services.pool])
        for item, ours, theirs in zip(asked, answers[WITHOUT], one.answers, strict=True):
            compare(item, ours, theirs, f"{where}, request {item.request.request_id}")
        for first, again in EVENTS[cell.event].twins:
            compare(asked[again], one.answers[first], one.answers[again], f"{where}, request {first} again as {again}")
    # What is cut from outside is cut at another token at each depth. So is what is evicted: it begins anew behind the
    # tokens it has by then, and what was drafted behind those is not looked at. Masks come in their own time.
    by_timing = cell.is_structured or any(item.is_cut for item in asked)
    if not by_timing and services.drafts != "auto" and not any(one.counted["evicted"] for one in runs.values()):
        _check_places(runs, before, after)
    return [_seen(cell, services, runs[d], before[d], after[d]) for d in services.urls]


def _check_places(runs: Mapping[str, Run], before: Mapping[str, ServerStats], after: Mapping[str, ServerStats]) -> None:
    """As many drafts were looked at, and as many right, in each place of a run, at every depth; and of each request. A
    race would show here first."""
    places = {depth: drafts_by_place(before[depth], after[depth]) for depth in runs if depth != WITHOUT}
    told = {depth: [(answer.drafts, answer.by_place) for answer in runs[depth].answers] for depth in places}
    assert all(found == places["serial"] for found in places.values()), places
    assert all(counts == told["serial"] for counts in told.values()), told
    if all(counts is not None for counts, _ in told["serial"]):  # None as with a stop string that was met
        for i, name in enumerate(("drafted", "accepted")):
            summed: Counter[int] = Counter()
            for counts, by_place in told["serial"]:
                assert counts is not None and counts[i] == sum(by_place[i].values())
                summed.update(by_place[i])
            assert summed == Counter(places["serial"][name])


def _seen(cell: Cell, services: Services, run: Run, before: ServerStats, after: ServerStats) -> dict[str, int]:
    """What happened in a run, by name; none of it may be zero."""
    seen = {**EVENTS[cell.event].witness(run), **saw_kind(run), **saw_depth(run)}
    if services.drafts != "auto" or cell.is_structured:
        seen["drafts kept"] = run.counted["drafts kept"]
    if not cell.is_structured:
        return seen
    with_masks = [pair for pair in zip(run.asked, run.answers, strict=True) if is_structured(pair[0].request)]
    assert after.masks.written - before.masks.written >= sum(len(answer.tokens) for _, answer in with_masks)
    ended = [fits(item.request, answer.text) for item, answer in with_masks if answer.reason == "END_OF_SEQUENCE"]
    assert all(ended), "something has ended by itself and does not fit"
    if cell.event in ("end-of-sequence", "prefix-hit"):
        seen["ended by itself, and fits"] = len(ended)
    return {**seen, "rows held": after.tokens.held_rows - before.tokens.held_rows}
