"""The columns of `Rows` that only later decisions read, computed again from a log of launches after every turn.

The log holds the plans as they were staged and the result cells as the device wrote them, by row slot and epoch. It
never reads a column that it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import FORCED, HELD, VOID
from runahead.runtime.memory.prefix_cache import Hit
from runahead.runtime.plan import CHUNK_ROW, CHUNK_START, CHUNK_TOKENS, read_plan
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import Commit, Eviction, Release
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase
from runahead.runtime.wire.engine_config import MOST_DRAFTS
from tests.simulation.assembly import SimulatedChain


@dataclass(slots=True)
class _Sampled:
    """One S of a row. least, most: tokens that it may bring. brought: tokens that it brought; None: not committed."""

    least: int
    most: int
    brought: int | None = None


@dataclass(slots=True)
class _Logged:
    """A row in one epoch. last: its last launch. samples: the next S samples it. end: of its newest prompt chunk.
    first_sample: the launch behind that chunk. drafts: of its last F. sampled: by launch. drafted, accepted: by place
    in a run. finite: no launch that has retired left it a NaN or an infinity."""

    may_hold: bool
    last: int = 0
    samples: bool = False
    end: int = 0
    first_sample: int = 0
    drafts: int = 0
    sampled: dict[int, _Sampled] = field(default_factory=dict)
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(MOST_DRAFTS, np.int64))
    finite: bool = True

    def columns(self) -> dict[str, Any]:
        """What `Rows` must hold of it."""
        in_f = [one for number, one in self.sampled.items() if number <= self.last]
        least = self.end + sum(one.least if one.brought is None else one.brought for one in in_f)
        most = self.end + sum(one.most if one.brought is None else one.brought for one in in_f)
        newest = self.sampled.get(self.last + 1)
        brought = None if newest is None else newest.brought
        behind = 0 if brought is None else brought - 1  # nobody has forwarded the newest token
        return {
            "least_len": least + behind,
            "most_len": most + behind,
            "state_len": least,
            "last_launch": self.last,
            "last_naming": self.last + self.samples,
            "first_sample": self.first_sample,
            "drafts": self.drafts,
            "waits": brought == 0,
            "drafted": self.drafted.tolist(),
            "accepted": self.accepted.tolist(),
            "finite": self.finite,
        }

    @property
    def computed(self) -> int:
        """Tokens that have been through the model, once all are committed."""
        brought = [one.brought or 0 for one in self.sampled.values()]
        newest = self.sampled.get(self.last + 1)
        return self.end + sum(brought) - bool(newest and newest.brought)


class RowColumns:
    """Writes the log of a chain, and compares."""

    def __init__(self, chain: SimulatedChain) -> None:
        self._chain = chain
        self._rows: dict[tuple[int, int], _Logged] = {}
        self._computed: dict[int, int] = {}  # by the order of a request that was evicted: `Request.computed`
        self._recomputed = 0
        self._broken = ""
        scheduler, ledger = chain.engine.scheduler, chain.ledger
        holdings, commits = scheduler.holdings, scheduler.commits
        enqueue, retire, commit = ledger.enqueue, ledger.retire, commits.commit
        evicted, allocate_row = holdings.evicted, holdings.allocate_row

        def logged_enqueue(launch: Launch) -> None:
            self._enqueued(launch)
            enqueue(launch)

        def logged_commit(launch: Launch, cells: NDArray[np.int64], drafted: NDArray[np.int8] | None = None) -> Commit:
            self._committed(launch, cells, drafted)
            return commit(launch, cells, drafted)

        def logged_retire() -> list[Launch]:
            gone = retire()
            for launch in gone:
                self._retired(launch)
            return gone

        def logged_evicted(eviction: Eviction) -> Release:
            row = self._rows[eviction.row_slot, eviction.epoch]
            freed = evicted(eviction)
            if freed.row_slot == eviction.row_slot:
                self._computed[eviction.request.order] = row.computed
            return freed

        def logged_admission(request: Request, hit: Hit) -> None:
            if request.order in self._computed:
                self._recomputed += max(0, self._computed[request.order] - len(hit.blocks) * holdings.pool.block_size)
            allocate_row(request, hit)

        ledger.enqueue = logged_enqueue  # type: ignore[method-assign]
        ledger.retire = logged_retire  # type: ignore[method-assign]
        commits.commit = logged_commit  # type: ignore[method-assign]
        holdings.evicted = logged_evicted  # type: ignore[method-assign]
        holdings.allocate_row = logged_admission  # type: ignore[method-assign]

    def look(self) -> None:
        """Raises AssertionError where a column of a live row is not what the log says."""
        scheduler = self._chain.engine.scheduler
        rows = scheduler.rows
        assert not self._broken, self._broken
        live = {(slot, int(rows.epoch[slot])) for slot in np.flatnonzero(rows.phase).tolist()}
        self._rows = {
            key: row for key, row in self._rows.items() if key in live or row.last >= self._chain.ledger.retired
        }
        for slot, epoch in live:
            if rows.phase[slot] == RowPhase.FENCED:
                continue
            for name, right in self._rows[slot, epoch].columns().items():
                found = getattr(rows, name)[slot].tolist()
                assert found == right, f"row {slot}: {name} is {found}, the log says {right}"
        found = scheduler.tally.counters["recomputed_tokens"]
        assert found == self._recomputed, f"{found} tokens are counted as recomputed, the log says {self._recomputed}"

    def _enqueued(self, launch: Launch) -> None:
        rings, number = self._chain.device.rings, launch.number
        plan, holdings = read_plan(rings.plan[rings.slot(number)]), self._chain.engine.scheduler.holdings
        for slot, epoch, samples in _each(launch.sample_slots, launch.sample_epochs, launch.samples):
            row = self._rows[slot, epoch]
            if samples:
                row.sampled[number] = _Sampled(1 - row.may_hold, 1 + row.drafts)
        for slot, epoch, samples in _each(launch.row_slots, launch.row_epochs, launch.row_samples):
            if (slot, epoch) not in self._rows:
                self._rows[slot, epoch] = _Logged(holdings.request(slot).may_hold)
            row = self._rows[slot, epoch]
            row.last, row.samples = number, samples
            row.drafts = plan.drafts if row.may_hold else plan.guesses
        for chunk in plan.chunks:
            slot, place = int(launch.row_slots[chunk[CHUNK_ROW]]), int(chunk[CHUNK_ROW])
            row = self._rows[slot, int(launch.row_epochs[place])]
            row.end, row.first_sample, row.drafts = int(chunk[CHUNK_START] + chunk[CHUNK_TOKENS]), number + 1, 0

    def _committed(self, launch: Launch, cells: NDArray[np.int64], drafted: NDArray[np.int8] | None) -> None:
        brought = np.count_nonzero((cells & (VOID | HELD)) == 0, axis=1).tolist()
        for place, (slot, epoch, samples) in enumerate(
            _each(launch.sample_slots, launch.sample_epochs, launch.samples)
        ):
            row = self._rows.get((slot, epoch))
            if row is None or not samples:
                continue
            row.sampled[launch.number].brought = brought[place]
            if drafted is None:
                continue
            looked_at = int(drafted[place]) & ~FORCED
            if cells[place, 0] & HELD and looked_at:
                self._broken = f"launch {launch.number} holds row {slot} and has looked at {looked_at} drafts of it"
            row.drafted[:looked_at] += 1
            row.accepted[: max(0, brought[place] - 1)] += 1

    def _retired(self, launch: Launch) -> None:
        rings = self._chain.device.rings
        flags = rings.finite[rings.slot(launch.number)]
        for place, (slot, epoch, _) in enumerate(_each(launch.row_slots, launch.row_epochs, launch.row_samples)):
            row = self._rows.get((slot, epoch))
            if row is not None and not flags[place]:
                row.finite = False


def _each(
    slots: NDArray[np.int32], epochs: NDArray[np.int64], samples: NDArray[np.bool_]
) -> list[tuple[int, int, bool]]:
    return list(zip(slots.tolist(), epochs.tolist(), samples.tolist(), strict=True))
