"""One run of a script at one depth, every invariant checked after every turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.watchdog import LaunchHungError, NoProgressError
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import EVERYTHING
from tests.simulation.assembly import make_chain
from tests.simulation.book import Book
from tests.simulation.columns import RowColumns
from tests.simulation.completions import completions_of
from tests.simulation.fairness import FairShares
from tests.simulation.invariants import INVARIANTS, Evictions, Hanging, Progress, Staged
from tests.simulation.lengths import check_lengths
from tests.simulation.script import ANYONE, Ask, Event, Kind, Script, Wires
from tests.simulation.transcript import Heard, Transcript
from tests.simulation.witness import Witness

_TURNS = 5_000  # far more than any script takes
_FROM_FRONT_ENDS = (Kind.ABORT, Kind.ABORT_ALL, Kind.LOSE)  # that `owner` does


class Broken(Exception):
    """A script that went wrong. what: the name of the invariant, or of the error that the engine raised."""

    def __init__(self, script: Script, depth: int, what: str, why: object) -> None:
        super().__init__(f"seed {script.seed} ({script.world.mode}), depth {depth}: {what}: {why}")
        self.script = script
        self.depth = depth
        self.what = what


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a run. heard: by handle, what each request that was sent was told. has_failed: the device did, or
    hung."""

    heard: dict[int, Heard]
    has_failed: bool
    witness: Witness


def _order_of(kind: Kind) -> int:
    """Of events in one turn: whatever is sent between a front end's last word and the engine's reading it would seem to
    come too late."""
    if kind is Kind.DRAIN:
        return 0
    return 2 if kind in (Kind.ABORT, Kind.ABORT_ALL, Kind.FAIL, Kind.STALL) else 1


class Life:
    """witness: counts what happened. num_ranks: as of `make_chain`."""

    def __init__(self, script: Script, depth: int, num_ranks: int = 1) -> None:
        self.script = script
        self.depth = depth
        self.chain = make_chain(script, depth, num_ranks=num_ranks)
        self.wires = Wires(script)
        self.transcript = Transcript(script, self.wires)
        self.book = Book(script, self.wires, script.world.turn_work or EVERYTHING)
        self.witness = Witness(script, self.wires)
        self._progress, self._evictions, self._staged = Progress(depth), Evictions(self.chain), Staged()
        self._columns = RowColumns(self.chain)
        self._shares = FairShares(self.chain, script.world, depth, len({ask.caller for ask in script.asks}))
        self._hanging = Hanging(script.world.launch_timeout_s, script.world.turn_s)
        self._turn = 0
        self._asks = list(enumerate(script.asks))  # not sent yet
        self._events = sorted(script.events, key=lambda event: _order_of(event.kind))  # that have not happened yet
        self._sent: dict[int, Ask] = {}
        self._lost: set[int] = set()  # front ends
        self._given_up: set[int] = set()  # requests whose front end has said that nobody listens, or is gone
        self._before: tuple[list[int], int, float] | None = None  # a turn: who waited, the free rows, and when
        self._aborts = 0  # calls
        self._failure: Kind | None = None  # FAIL or STALL, once it has happened

    def live(self) -> Told:
        """From the first request until nothing is left to do, or the device fails. Raises Broken."""
        try:
            self._live()
        except (DeviceError, NoProgressError) as error:
            self._read()
            is_hung = isinstance(error, LaunchHungError)
            if self._failure is Kind.STALL:
                self._check("watchdog", lambda: self._hanging.stopped(self.chain, is_hung))
            self.witness.count("device failed" if self._failure is Kind.FAIL else "hung launch found")
        self._check("one terminal", self._check_terminals)
        self._check("counted ends", self._check_ends)
        self.witness.count("row left for a caller without one", self._shares.left)
        self.witness.close(self.chain, self.transcript, self.book, self._progress.longest)
        heard = {handle: self.transcript.heard[handle] for handle in self._sent}
        return Told(heard, self._failure is not None, self.witness)

    def _live(self) -> None:
        while self._asks or any(event.turn >= 0 for event in self._events) or not self.chain.quiet:
            self._events = [event for event in self._events if not self._settles(event)]
            self._send()
            self._look_before()
            self._step(self.chain.engine.turn)
            self._turn += 1
            self.chain.clock.pass_by(self.script.world.turn_s)
            if self._turn > _TURNS:
                raise Broken(self.script, self.depth, "progress", "it never ends")
        self._drain("shutdown")
        self._check("quiescence", self.chain.check_nothing_is_left)
        self._check("quiescence", self._check_pools)
        if self._failure is Kind.FAIL:
            raise Broken(self.script, self.depth, "witness", "the device was to fail, and nobody noticed")

    # ------------------------------------------------------------ what is done to the engine

    def _send(self) -> None:
        while self._asks and self._asks[0][1].turn <= self._turn:
            handle, ask = self._asks.pop(0)
            if ask.owner not in self._lost:
                self.witness.count("came when nothing was left", bool(self._sent) and self.chain.quiet)
                self._sent[handle] = ask
                if not ask.index:
                    self.chain.tell(self._submit(handle, ask), owner=ask.owner)

    def _submit(self, handle: int, ask: Ask) -> m.Submit:
        return prepared_submit(
            self.wires.numbers[handle],
            ask.request_id,
            np.array(ask.prompt, np.int32),
            ask.sampling,
            ask.stopping,
            block_size=self.chain.engine.scheduler.pool.block_size,
            priority=ask.priority,
            cache_salt=ask.salt,
            structure=ask.grammar,
            caller=ask.caller,
            outranks=ask.outranks,
            n=len(completions_of(self.script.asks, handle)),
        )

    def _look_before(self) -> None:
        """What the book needs of the engine, as it is before the coming turn."""
        waiting = [handle for handle in self._served() if self._phase_of(handle) == "WAITING"]
        self._before = waiting, self.chain.engine.scheduler.rows.free, self.chain.clock.now

    def _take_down(self) -> None:
        """What the turn has read, into the book. Nobody listens any more to those that it ended without a word."""
        if self._before is None:
            return
        waiting, free_rows, now = self._before
        self._before = None
        self.book.read(self.chain.links.take_taken(), not self.chain.links.has_more, waiting, free_rows, now)
        for handle in self.book.take_dropped():
            self.transcript.heard[handle].unheard = True

    def _settles(self, event: Event) -> bool:
        """The event happens now, or can't any more."""
        if event.kind in _FROM_FRONT_ENDS and event.owner in self._lost:
            return True
        if event.turn >= 0:
            due, handle = self._turn >= event.turn, event.handle
        elif event.handle == ANYONE:
            handle = next((handle for handle in self._served() if self._phase_of(handle) == event.phase), ANYONE)
            due = handle != ANYONE
        elif self._is_over(event.handle):
            return True
        else:
            due, handle = self._has_come_to(event), event.handle
        if due:
            self._do(event, handle)
        return due

    def _has_come_to(self, event: Event) -> bool:
        if event.tokens >= 0:
            return event.handle in self._sent and len(self.transcript.heard[event.handle].tokens) >= event.tokens
        return event.handle in self._sent and self._phase_of(event.handle) == event.phase

    def _served(self) -> list[int]:
        return [self.wires.of(tracked.request) for tracked in self.chain.engine.registry.all()]

    def _is_over(self, handle: int) -> bool:
        return handle in self._given_up or self.transcript.heard[handle].is_over

    def _phase_of(self, handle: int) -> str:
        tracked = self.chain.engine.registry.by_handle(self._sent[handle].owner, self.wires.numbers[handle])
        return "" if tracked is None else self.chain.engine.scheduler.holdings.phase_of(tracked.request)

    def _do(self, event: Event, handle: int) -> None:
        """handle: the request that the event waited for, which it is about."""
        chain, asks, kind, owner = self.chain, self.script.asks, event.kind, event.owner
        self.witness.count(f"event: {kind}")
        match kind:
            case Kind.CANCEL | Kind.DEADLINE | Kind.STOP_STRING:
                reason = FinishReason.STOP if kind is Kind.STOP_STRING else FinishReason.CANCELLED
                if handle in self._sent and asks[handle].owner not in self._lost:
                    self._given_up.add(handle)
                    chain.tell(m.Cancel(self.wires.numbers[handle], reason), owner=asks[handle].owner)
            case Kind.ABORT | Kind.ABORT_ALL:
                self._aborts += 1
                named = tuple(asks[one].request_id for one in (handle, *event.also))
                is_all = kind is Kind.ABORT_ALL
                chain.tell(m.Abort(self._aborts, () if is_all else named, is_all), owner=owner)
            case Kind.LOSE:
                self._lost.add(owner)
                self._given_up |= {sent for sent, ask in self._sent.items() if ask.owner == owner}
                chain.tell(None, owner=owner)
            case Kind.DRAIN:
                self._drain("test")
            case Kind.FAIL:
                self._failure = self._failure or kind
                chain.device.fail(RuntimeError("as the script says"))
            case Kind.STALL:
                self._failure = self._failure or kind
                chain.device.is_stalled = True

    # ------------------------------------------------------------ what is checked

    def _check(self, what: str, check: Callable[[], None]) -> None:
        """Raises Broken, naming `what`, or the error that the script wants."""
        try:
            check()
        except Exception as error:
            if self._is_wanted(error):
                raise
            name = what if isinstance(error, AssertionError) and str(error) else f"{what}, {type(error).__name__}"
            raise Broken(self.script, self.depth, name, f"turn {self._turn}: {error}") from error

    def _is_wanted(self, error: Exception) -> bool:
        """The script made the device fail, or hang."""
        if self._failure is Kind.STALL:
            return isinstance(error, LaunchHungError | NoProgressError)
        return self._failure is Kind.FAIL and isinstance(error, DeviceError) and not isinstance(error, LaunchHungError)

    def _step(self, step: Callable[[], None]) -> None:
        self._check("engine", step)
        self._read()
        for invariant in INVARIANTS:
            self._check(invariant.__name__, lambda invariant=invariant: invariant(self.chain))  # type: ignore[misc]
        self._check("staged plans", lambda: self._staged.look(self.chain))
        self._check("columns", self._columns.look)
        self._check("fair shares", lambda: self._shares.look(self.chain))
        self._check("progress", lambda: self._progress.look(self.chain))
        self._check("evictions", lambda: self._evictions.look(self.chain))
        self._check("watchdog", lambda: self._hanging.look(self.chain))
        self.witness.look(self.chain)

    def _read(self) -> None:
        """What the engine has said since the last look."""
        self._check("what is read", self._take_down)
        self._check("order", lambda: self.transcript.read(self.chain.links.sent))
        self._check("who is served", lambda: self.book.compare(self.transcript, set(self._served())))

    def _drain(self, reason: str) -> None:
        """The engine compares the device's rows with the host's; then their lengths are."""
        self._step(lambda: self.chain.engine.drain(reason))
        self._check("lengths", lambda: check_lengths(self.chain))
        self.witness.drained(self.chain)

    def _check_terminals(self) -> None:
        """Exactly one end for whoever still listens; none but the engine's own for those that it was serving when the
        device failed."""
        served = set(self._served())
        on_their_way = {
            self.wires.handle(owner, sent.handle + index)
            for owner, sent in self.chain.links.unread
            if isinstance(sent, m.Submit)
            for index in range(sent.n)
        }
        for handle in self._sent:
            heard = self.transcript.heard[handle]
            if handle in served | on_their_way:
                assert self._failure and heard.reason is None, f"{handle} is still served"
            else:
                assert heard.is_over, f"{handle} has no terminal"

    def _check_ends(self) -> None:
        """The engine has counted every end that there was, under its reason."""
        counted = self.chain.engine.stats().finished
        assert counted == dict(self.book.ends), f"the engine counted ends {counted}; there were {dict(self.book.ends)}"

    def _check_pools(self) -> None:
        scheduler = self.chain.engine.scheduler
        assert scheduler.holdings.state_slots.free == scheduler.holdings.state_slots.total, "a state slot is not free"
        assert not scheduler.waiting and not any(scheduler.holdings.by_slot), "a request is left"
        callers = scheduler.holdings.callers
        assert not callers._requests and not callers._served, "a caller without a request is known"
        assert len(self.chain.engine.registry) == 0, "the registry knows a request"
