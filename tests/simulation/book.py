"""Who is being served, kept from what was sent and what was answered alone, and what the engine owes each message.

The engine reads what was sent at the beginning of a turn, all of it or as much as a turn has work for: a request that
comes or is cancelled is a piece of work; so is each id of an abort, and its answer; so is a front end that is lost, and
each of its requests. What the engine must answer follows from the book, from what it has read, and from two figures of
its own at that moment: who waits for a row, and how many rows are free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from runahead.runtime.engine.live_requests import EARLY_ABORT_S
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.simulation.completions import completions_of
from tests.simulation.oracle import answer
from tests.simulation.script import Script, Wires
from tests.simulation.transcript import Transcript

_FULL = "RESOURCE_EXHAUSTED"


@dataclass(slots=True)
class _Due:
    """What one turn owes. refusals: by request that was submitted, the codes that it may be refused with, of which one
    must come; none means that it must be accepted. aborted: requests that must end so. answers: to aborts, in order."""

    refusals: dict[int, frozenset[str]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    answers: list[tuple[int, m.AbortResult]] = field(default_factory=list)


class Book:
    """served: requests that were accepted and have not ended. ends: of all others that were accepted, by reason, those
    that were never told included. counts: of what a simulation should have seen. turn_work: pieces of work that the
    engine does in a turn for what has arrived."""

    def __init__(self, script: Script, wires: Wires, turn_work: int) -> None:
        self.served: dict[int, str] = {}  # ids by handle: the completions of a prompt have one
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._asks = script.asks
        self._wires = wires
        self._max_queue = script.world.max_queue
        self._never = [bool(answer(ask, script.world).refusal) for ask in script.asks]
        self._finished: set[str] = set()  # ids that were served once
        self._early: dict[str, float] = {}  # ids aborted before they came, and until when that counts
        self._due = _Due()
        self._dropped: list[int] = []
        self._turn_work = turn_work
        self._doing: Iterator[int] | None = None  # what the newest message asks for, as far as it is not done
        self._waiting: set[int] = set()
        self._free_rows = 0
        self._now = 0.0

    # ------------------------------------------------------------ what a turn has read

    def read(
        self, taken: Iterable[tuple[int, m.ToEngine | None]], is_all: bool, waiting: Iterable[int], free_rows: int,
        now: float,
    ) -> None:  # fmt: skip
        """A turn began with this. taken: what it has read, in order. is_all: nothing was left unread. waiting: requests
        that had no row before it. free_rows: as many as there were. now: seconds on the engine's clock."""
        self._waiting, self._free_rows, self._now = {*waiting}, free_rows, now
        messages, left = deque(taken), self._turn_work
        while left > 0 and (self._doing is not None or messages):
            if self._doing is None:
                self._doing = self._begin(*messages.popleft())
            work = next(self._doing, 0)
            left -= work
            self._doing = self._doing if work else None
        self.counts["something was left unread"] += not is_all
        self.counts["a message took several turns"] += self._doing is not None
        assert not messages, f"more was read than a turn has work for: {messages}"
        assert is_all or left <= 0, "a turn had work left, and something to read"

    def take_dropped(self) -> list[int]:
        """Requests that were ended since the last call because nobody listens to them any more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _begin(self, owner: int, message: m.ToEngine | None) -> Iterator[int]:
        """What a message asks for, some pieces of work at a time."""
        match message:
            case m.Submit():
                handle = self._wires.handle(owner, message.handle)
                assert handle is not None
                room = self._max_queue + self._free_rows - len(self._waiting & set(self.served))
                same = completions_of(self._asks, handle)
                assert message.n == len(same)
                if self._submitted(same, room, self._now):
                    self._waiting |= set(same)
                yield len(same)
            case m.Cancel():
                handle = self._wires.handle(owner, message.handle)
                if handle is not None and handle in self.served:
                    self._drop(handle, message.reason)
                yield 1
            case m.Abort():
                yield from self._abort(owner, message)
            case None:
                yield 1
                yield from self._lose(owner)

    def _submitted(self, same: range, room: int, now: float) -> bool:
        """They are accepted. same: handles of the completions of a prompt."""
        handle, ask = same[0], self._asks[same[0]]
        until = self._early.pop(ask.request_id, None)
        was_aborted = until is not None and until > now  # it ends at once, and needs no room
        reasons = {
            "ALREADY_EXISTS": ask.request_id in self.served.values(),
            _FULL: room < len(same) and not was_aborted,
            "INVALID_ARGUMENT": self._never[handle],
        }
        codes = frozenset(code for code, holds in reasons.items() if holds)
        self._due.refusals[handle] = codes
        if codes:
            return False
        self.served.update(dict.fromkeys(same, ask.request_id))
        self.counts["several completions of a prompt"] += len(same) > 1
        if until is not None:
            self.counts["aborted before it came" if was_aborted else "aborted too long before it came"] += 1
        if was_aborted:
            for one in same:
                self._must_abort(one)
        return True

    def _abort(self, owner: int, message: m.Abort) -> Iterator[int]:
        """Of all: those that are served when it is read, the youngest first, unless they end before their turn."""
        self.counts["several aborted at once"] += len(message.request_ids) > 1 or message.all_requests
        answered: list[tuple[str, str]] = []
        ids_served = tuple(dict.fromkeys(self.served.values()))
        for request_id in reversed(ids_served) if message.all_requests else message.request_ids:
            work = max(1, len(self._handles_of(request_id)))
            if message.all_requests and request_id not in self.served.values():
                self.counts["ended by itself before its turn to be ended"] += 1
            else:
                answered.append((request_id, self._abort_one(request_id, owner, self._now)))
            yield work
        ids, outcomes = tuple(one for one, _ in answered), tuple(outcome for _, outcome in answered)
        self._due.answers.append((owner, m.AbortResult(message.call, ids, outcomes)))
        yield 1

    def _handles_of(self, request_id: str) -> list[int]:
        return [handle for handle, name in self.served.items() if name == request_id]

    def _abort_one(self, request_id: str, owner: int, now: float) -> str:
        if handles := self._handles_of(request_id):
            self.counts["aborted by another front end"] += self._asks[handles[0]].owner != owner
            for handle in handles:
                self._must_abort(handle)
            return "ABORTED"
        if request_id in self._finished:
            return "ALREADY_FINISHED"
        self._early[request_id] = now + EARLY_ABORT_S
        return "NOT_FOUND"

    def _lose(self, owner: int) -> Iterator[int]:
        lost = [handle for handle in self.served if self._asks[handle].owner == owner]
        self.counts["front end lost beside another's requests"] += 0 < len(lost) < len(self.served)
        for handle in reversed(lost):
            if handle in self.served:
                self._drop(handle, FinishReason.CANCELLED)
            else:
                self.counts["ended by itself before its turn to be ended"] += 1
            yield 1

    def _drop(self, handle: int, reason: FinishReason) -> None:
        self._dropped.append(handle)
        self._end(handle, reason)

    def _must_abort(self, handle: int) -> None:
        self._due.aborted.add(handle)
        self._end(handle, FinishReason.ABORTED)

    def _end(self, handle: int, reason: FinishReason) -> None:
        request_id = self.served.pop(handle)
        if request_id not in self.served.values():
            self._finished.add(request_id)
        self.ends[reason.name] += 1

    # ------------------------------------------------------------ after it

    def compare(self, transcript: Transcript, served: set[int]) -> None:
        """What the turn has answered is what it owed, and it still serves whom it must. served: by the engine."""
        due, self._due = self._due, _Due()
        for handle, codes in due.refusals.items():
            refusal = transcript.heard[handle].refusal
            assert refusal is not None or not codes, f"{handle} was accepted; it must be refused, {set(codes)}"
            assert refusal is None or codes, f"{handle} was refused without a reason: {refusal}"
            assert refusal is None or refusal.code in codes, (
                f"{handle} was refused with {refusal.code}, not {set(codes)}"
            )
        for handle in due.aborted:
            reason = transcript.heard[handle].reason
            assert reason is FinishReason.ABORTED, f"{handle} was aborted and has ended with {reason}"
        for handle in tuple(self.served):
            reason = transcript.heard[handle].reason
            assert reason is not FinishReason.ABORTED, f"{handle} ended as aborted, and nobody had aborted it"
            if reason is not None:
                self._end(handle, reason)
        mine = set(self.served)
        assert served <= mine, f"{served - mine} are served, although they have ended or were never accepted"
        assert mine <= served, f"{mine - served} are not served any more, and were not told of an end"
        self._compare_answers(due.answers, transcript.take_answers())

    @staticmethod
    def _compare_answers(due: list[tuple[int, m.AbortResult]], given: list[tuple[int, m.AbortResult]]) -> None:
        """The ids of an abort of all may come in any order."""
        assert [(to, one.call) for to, one in given] == [(to, one.call) for to, one in due], (
            "other aborts were answered"
        )
        for (_, right), (_, told) in zip(due, given, strict=True):
            pairs = list(zip(told.request_ids, told.outcomes, strict=True))
            expected = list(zip(right.request_ids, right.outcomes, strict=True))
            assert sorted(pairs) == sorted(expected), f"an abort was answered {pairs}, not {expected}"
