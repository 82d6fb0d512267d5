"""Who is being served, kept from what was sent and what was answered alone, and what the engine owes each message.

The engine reads all that was sent at the beginning of a turn. What it must answer follows from the book and from two
figures of the engine at that moment: who waits for a row, and how many rows are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime import messages as m
from runtime.registry import EARLY_ABORT_S
from runtime.request import FinishReason
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
    that were never told included. counts: of what a simulation should have seen."""

    def __init__(self, script: Script, wires: Wires) -> None:
        self.served: dict[str, int] = {}  # by id
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._asks = script.asks
        self._wires = wires
        self._max_queue = script.world.max_queue
        self._never = [bool(answer(ask, script.world).refusal) for ask in script.asks]
        self._finished: set[str] = set()  # ids that were served once
        self._early: dict[str, float] = {}  # ids aborted before they came, and until when that counts
        self._due = _Due()

    # ------------------------------------------------------------ before a turn

    def read(
        self, inbox: Sequence[tuple[int, m.ToEngine | None]], waiting: Iterable[int], free_rows: int, now: float
    ) -> None:
        """All that the coming turn reads. waiting: requests without a row. now: seconds on the engine's clock."""
        waiting = set(waiting)
        for owner, message in inbox:
            match message:
                case m.Submit():
                    handle = self._wires.handle(owner, message.handle)
                    assert handle is not None
                    room = self._max_queue + free_rows - len(waiting & set(self.served.values()))
                    if self._submitted(handle, room, now):
                        waiting.add(handle)
                case m.Cancel():
                    handle = self._wires.handle(owner, message.handle)
                    if handle in self.served.values():
                        self._end(handle, message.reason)
                case m.Abort():
                    self._abort(owner, message, now)
                case None:
                    self._lose(owner)

    def _submitted(self, handle: int, room: int, now: float) -> bool:
        """It is accepted."""
        ask = self._asks[handle]
        until = self._early.pop(ask.request_id, None)
        was_aborted = until is not None and until > now  # it ends at once, and needs no room
        reasons = {
            "ALREADY_EXISTS": ask.request_id in self.served,
            _FULL: room <= 0 and not was_aborted,
            "INVALID_ARGUMENT": self._never[handle],
        }
        codes = frozenset(code for code, holds in reasons.items() if holds)
        self._due.refusals[handle] = codes
        if codes:
            return False
        self.served[ask.request_id] = handle
        if until is not None:
            self.counts["aborted before it came" if was_aborted else "aborted too long before it came"] += 1
        if was_aborted:
            self._must_abort(handle)
        return True

    def _abort(self, owner: int, message: m.Abort, now: float) -> None:
        ids = tuple(self.served) if message.all_requests else message.request_ids
        self.counts["several aborted at once"] += len(ids) > 1
        outcomes = tuple(self._abort_one(request_id, owner, now) for request_id in ids)
        self._due.answers.append((owner, m.AbortResult(message.call, ids, outcomes)))

    def _abort_one(self, request_id: str, owner: int, now: float) -> str:
        handle = self.served.get(request_id)
        if handle is not None:
            self.counts["aborted by another front end"] += self._asks[handle].owner != owner
            self._must_abort(handle)
            return "ABORTED"
        if request_id in self._finished:
            return "ALREADY_FINISHED"
        self._early[request_id] = now + EARLY_ABORT_S
        return "NOT_FOUND"

    def _lose(self, owner: int) -> None:
        lost = [handle for handle in self.served.values() if self._asks[handle].owner == owner]
        self.counts["front end lost beside another's requests"] += 0 < len(lost) < len(self.served)
        for handle in lost:
            self._end(handle, FinishReason.CANCELLED)

    def _must_abort(self, handle: int) -> None:
        self._due.aborted.add(handle)
        self._end(handle, FinishReason.ABORTED)

    def _end(self, handle: int, reason: FinishReason) -> None:
        request_id = self._asks[handle].request_id
        del self.served[request_id]
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
        for handle in tuple(self.served.values()):
            reason = transcript.heard[handle].reason
            assert reason is not FinishReason.ABORTED, f"{handle} ended as aborted, and nobody had aborted it"
            if reason is not None:
                self._end(handle, reason)
        mine = set(self.served.values())
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
