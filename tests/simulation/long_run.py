"""`python -m tests.simulation.long_run`: an engine whose counters begin shortly before 2**31 or 2**32 serves across it.

Beside it runs a control whose counters began at 0. Both are the real engine on the simulated device, are told the same
by an endless script, and turn by turn must say the same: every message to a front end, every logged snapshot, and now
and then the differences of all figures since the start. Nothing is kept but what the next turn needs, so that a run may
be as long as one likes. The seed decides all but where it stops.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from runahead.runtime.engine.figures import Snapshot
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import FinishReason
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.runtime.chain import Chain, make_chain
from tests.runtime.from_zero import Begun
from tests.simulation.endless import BLOCK_SIZE, CONTEXT, Endless

DEPTHS: Final = (0, 1, 2, 4)
LOG_INTERVAL: Final = 16  # divides every border and how far before it a run begins: both engines log the same launches
_PER_HANDLE: Final = 8  # launches from one request to the next, at most: the handles cross a border about as soon
_PER_EPOCH: Final = 40
_CALLS, _OWNERS = 20, 2  # how far before a border these begin
_DRAIN_TURNS: Final = 2_000  # from one drain, which compares the device's rows with the host's, to the next
_PROGRESS_S: Final = 30.0

# What has to happen in a run, or it shows less than it says.
WANTED: Final = (
    "aborted", "evicted", "paused", "readmitted", "cached tokens", "refused", "front ends lost", "snapshots",
    "launches after the border", "handles after the border", "epochs after the border", "calls after the border",
    "front ends after the border",
)  # fmt: skip


class Differs(AssertionError):
    """The two engines do not say the same."""


def _clock() -> Callable[[], float]:
    """Each look at it is a millisecond later than the one before: the same for both engines, if they do the same."""
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return looks / 1000

    return clock


@dataclass(slots=True)
class Side:
    """One of the two engines. begun: where its counters did."""

    chain: Chain
    begun: Begun
    snapshots: list[Snapshot]


def _make_side(depth: int, seed: int, begun: Begun, epoch: int) -> Side:
    snapshots: list[Snapshot] = []
    chain = make_chain(
        depth,
        schedule=seeded_schedule(seed),
        max_rows=4,
        num_blocks=13,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT,
        penalty_slots=2,
        max_queue=6,
        clock=_clock(),
        log_interval=LOG_INTERVAL,
        write_snapshot=snapshots.append,
        counters_from=begun.launches,
    )
    chain.engine.scheduler.rows.epoch[:] = epoch
    return Side(chain, begun, snapshots)


class Pair:
    """One depth: the engine across the border, and its control.

    before: launches from where it begins to the border. counts: what has happened, in both.
    """

    def __init__(self, depth: int, border: int, before: int, seed: int) -> None:
        begun = Begun(border - before, border - before // _PER_HANDLE, border - _CALLS, border - _OWNERS)
        self.depth = depth
        self.border = border
        self.counts: Counter[str] = Counter()
        self._epoch = border - before // _PER_EPOCH
        self._script = Endless(seed)
        self._across = _make_side(depth, seed, begun, self._epoch)
        self._control = _make_side(depth, seed, Begun(), 0)
        self._turns = 0

    def turn(self) -> None:
        """One turn of both. Raises Differs."""
        served = [tracked.request for tracked in self._control.chain.engine.registry.all()]
        for owner, message in self._script.messages(served):
            self._tell(owner, message)
        self._step(lambda side: side.chain.turn())
        self._turns += 1
        if self._turns % _DRAIN_TURNS == 0:
            self._step(lambda side: side.chain.engine.drain("test"))
            self._compare_stats()

    def finish(self) -> None:
        """No more is asked; everything ends, and the figures are compared a last time. Raises Differs."""
        while not self._control.chain.quiet:
            self._step(lambda side: side.chain.turn())
        self._step(lambda side: side.chain.engine.drain("shutdown"))
        self._compare_stats()
        self._across.chain.check_nothing_is_left()
        stats, scheduler = self._across.chain.engine.stats(), self._across.chain.engine.scheduler
        self.counts["launches after the border"] = stats.launches - self.border
        self.counts["epochs after the border"] = int((scheduler.rows.epoch - self.border).max())
        self.counts["cached tokens"] = stats.cached_tokens
        self.counts["front ends lost"] = stats.front_ends_lost
        for kind in ("aborted", "evicted", "paused", "readmitted", "admitted"):
            self.counts[kind] = stats.events[kind].count if kind in stats.events else 0

    @property
    def launches_after(self) -> int:
        """Below 0: the border is still ahead."""
        return self._across.chain.ledger.launched - self.border

    def _tell(self, owner: int, message: m.ToEngine | None) -> None:
        for side in (self._control, self._across):
            owner_here, shifted = side.begun.shifted(owner, message)
            side.chain.tell(shifted, owner=owner_here)
        self._after("front ends", owner_here)
        if isinstance(shifted, m.Submit):
            self._after("handles", shifted.handle)
        elif isinstance(shifted, m.Abort | m.StatsQuery | m.TraceQuery):
            self._after("calls", shifted.call)

    def _after(self, what: str, number: int) -> None:
        self.counts[f"{what} after the border"] = max(self.counts[f"{what} after the border"], number - self.border)

    def _step(self, step: Callable[[Side], None]) -> None:
        for side in (self._control, self._across):
            step(side)
        ours, theirs = self._across, self._control
        told, expected = ours.chain.links.sent, theirs.chain.links.sent
        found = [ours.begun.from_zero(owner, message) for owner, message in told]
        self._must_be_equal("message to a front end", found, expected)
        logged = [ours.begun.snapshot(snapshot) for snapshot in ours.snapshots]
        self._must_be_equal("snapshot", logged, theirs.snapshots)
        self.counts["messages compared"] += len(found)
        self.counts["snapshots"] += len(logged)
        for _, message in found:
            self._count(message)
        for kept in (told, expected, ours.snapshots, theirs.snapshots):
            kept.clear()

    def _count(self, message: m.ToFrontEnd) -> None:
        if isinstance(message, m.Output):
            self.counts["tokens compared"] += len(message.tokens) // 4
            for end in message.finished:
                self.counts["requests ended"] += 1
                self.counts[f"ended: {FinishReason(end.reason).name}"] += 1
        self.counts["refused"] += isinstance(message, m.Refused)

    def _compare_stats(self) -> None:
        ours, theirs = (side.begun.stats(side.chain.engine.stats()) for side in (self._across, self._control))
        self._must_be_equal("figure", _figures(ours), _figures(theirs))
        self.counts["times that all figures were compared"] += 1

    def _must_be_equal(self, what: str, found: Sequence[object], expected: Sequence[object]) -> None:
        if found == expected:
            return
        differing = [(one, other) for one, other in zip(found, expected, strict=False) if one != other]
        if differing:
            raise Differs(f"depth {self.depth}, turn {self._turns}: {what} {differing[0][0]}, not {differing[0][1]}")
        raise Differs(f"depth {self.depth}, turn {self._turns}: {len(found)} of {what}, not {len(expected)}")


def _figures(stats: EngineStats) -> list[tuple[str, object]]:
    return [(name, getattr(stats, name)) for name in stats.__struct_fields__]


def run(pairs: Sequence[Pair], until: Callable[[], bool], report: Callable[[], None] = lambda: None) -> None:
    """Turn all pairs, one after the other, until it is time to stop, and finish them. Raises Differs."""
    while not until():
        for pair in pairs:
            pair.turn()
        report()
    for pair in pairs:
        pair.finish()


def _memory() -> str:
    """The most that this process had so far. The run is flat if it stops growing."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB at most"


def _reporter(pairs: Sequence[Pair]) -> Callable[[], None]:
    begun = shown = time.monotonic()

    def report() -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _PROGRESS_S:
            shown = now
            after = ", ".join(f"{pair.launches_after:+,}" for pair in pairs)
            print(f"{now - begun:5.0f} s: launches from the border {after}; memory {_memory()}", flush=True)

    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the engines differ, or something that a run is about did not happen."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.long_run", description=__doc__)
    parser.add_argument("--bits", type=int, choices=(31, 32), default=31, help="the border is 2 to so many (31)")
    parser.add_argument("--before", type=int, default=10_000, help="launches from the start to the border (10,000)")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long it runs (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the script and the device's delays (0)")
    parser.add_argument("--depth", type=int, choices=DEPTHS, action="append", help="0 is serial (all)")
    options = parser.parse_args(arguments)
    if options.before % LOG_INTERVAL or not 0 < options.before < 1 << 31:
        parser.error(f"--before must be a multiple of {LOG_INTERVAL} below 2**31, and is {options.before}")
    pairs = [Pair(depth, 1 << options.bits, options.before, options.seed) for depth in options.depth or DEPTHS]
    print(f"counters begin {options.before:,} launches before 2**{options.bits}, and at 0 in the control", flush=True)
    ends_at = time.monotonic() + 60 * options.minutes
    try:
        run(pairs, lambda: time.monotonic() >= ends_at, _reporter(pairs))
    except Differs as difference:
        print(difference)
        return 1
    for pair in pairs:
        print(f"depth {pair.depth}, everything equal:")
        for what, count in sorted(pair.counts.items()):
            print(f"{count:>12,}  {what}")
    missing = [f"depth {pair.depth}: {what}" for pair in pairs for what in WANTED if pair.counts[what] <= 0]
    if missing:
        print("too short, or a mistake: this never happened: " + "; ".join(missing))
    print(f"memory {_memory()}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
