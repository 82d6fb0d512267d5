"""How often each kind of thing happened: a simulation in which something never happens proves nothing about it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT
from runahead.runtime.wire.parameters import FinishReason
from tests.simulation.assembly import SimulatedChain
from tests.simulation.book import Book
from tests.simulation.drafts import DraftProgram
from tests.simulation.programs import StateProgram
from tests.simulation.script import DEPTHS, DRAFTS, SERIAL, Ask, Kind, Mode, Script, Wires
from tests.simulation.transcript import Transcript

_PHASES: Final = ("WAITING", "PREFILL", "DECODE", "PAUSED", "LEAVING")
_LIFECYCLE: Final = ("admitted", "chunk", "paused", "resumed", "evicted", "readmitted", "aborted", "finished")
# Nobody's grammar is lost here.
_OF_GRAMMARS: Final = (FinishReason.STRUCTURE_LOST, FinishReason.STRUCTURE_COST, FinishReason.STRUCTURE_MISMATCH)
_REASONS: Final = [reason.name for reason in FinishReason if reason and reason not in _OF_GRAMMARS]

WANTED: Final = frozenset(
    {
        *(f"lifecycle: {kind}" for kind in _LIFECYCLE),
        *(f"chain held by: {kind}" for kind in _LIFECYCLE),
        *(f"ended from outside: {phase}" for phase in _PHASES),
        *(f"finished: {reason}" for reason in _REASONS),
        *(f"event: {kind}" for kind in Kind),
        *(f"refused: {code}" for code in ("ALREADY_EXISTS", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")),
        *(f"abort answered: {outcome}" for outcome in ("ABORTED", "ALREADY_FINISHED", "NOT_FOUND")),
        *(f"barrier: {reason}" for reason in ("logging", "shutdown", "test")),
        *(f"launch: {kind}" for kind in ("decode", "mixed", "closing", "overlapped", "first after idle")),
        *(f"mode: {mode}" for mode in Mode),
        *(f"blocks: {what}" for what in ("reserved", "adopted", "returned")),
        *(f"run of {tokens}" for tokens in range(1, 2 + DRAFTS)),
        *("run trimmed inside", "state slot reused"),
        *("form with drafts", "drafts given up for a row that began", "no drafts in so many rows"),
        *("no drafts beside a prompt that found no room", "no drafts beside a row that found no block"),
        *(
            "snapshot kept",
            "row began with a snapshot",
            "evicted row began with a snapshot",
            "snapshot given out again",
        ),
        *("border without a snapshot, for want of one", "border inside a run", "run of a row that is held"),
        *(
            "row held",
            "row with a state held",
            "grammar followed to its end",
            "forced token kept",
            "row with a grammar evicted",
        ),
        *("void rows", "deferred releases", "held back", "recomputed tokens", "readmitted with a cached prefix"),
        *("cache hit", "cached block reused", "fenced block found", "block shared", "front end lost"),
        *("non-finite row", "non-finite chunk", "non-finite hidden state in decode", "device failed"),
        *("hung launch found", "slow device waited for", "aborted too long before it came"),
        *("prompt log-probabilities", "prompt log-probabilities after an eviction"),
        "row left for a caller without one",
        *("several completions of a prompt", "completion waited for its prompt", "state in a snapshot"),
        *("first completion ended before its prompt was shared", "shared blocks found without a prefix cache"),
        *("penalised row evicted", "its penalty slot reused"),
        *("snapshot logged", "row compared", "paused row compared", "evicted by a higher priority"),
        *(f"drawn {how}" for how in ("greedily", "at a temperature", "with filters", "with a bias", "with penalties")),
        *(f"drawn {how}" for how in ("from allowed tokens", "with a minimum length", "with log-probabilities")),
        *("aborted before it came", "aborted by another front end", "several aborted at once"),
        *("evicted as often as any may be", "front end lost beside another's requests", "came when nothing was left"),
        *("something was left unread", "a message took several turns", "ended by itself before its turn to be ended"),
        *(f"depth {depth}" for depth in (SERIAL, *DEPTHS)),
        *(f"launch queued as number {place} of those not committed" for place in DEPTHS),
    }
)


class Witness:
    """counts: of one run."""

    def __init__(self, script: Script, wires: Wires) -> None:
        self.counts: Counter[str] = Counter()
        self.longest_stall = 0
        self._script = script
        self._wires = wires
        self._penalty_slot_of: dict[int, int] = {}  # by handle, at the last look
        self._evictions: Counter[int] = Counter()
        self._left_by_evicted: dict[int, int] = {}  # penalty slots, and whose they were
        self._begun_with: dict[int, int] = {}  # by handle, the snapshot that its row's state began as
        self._state_slots: dict[int, int] = {}  # whose each was last

    def count(self, what: str, times: int = 1) -> None:
        if times:
            self.counts[what] += times

    def look(self, chain: SimulatedChain) -> None:
        """After a turn."""
        running = [request for request in chain.engine.scheduler.holdings.by_slot if request]
        self.count("completion waited for its prompt", chain.engine.scheduler.waiting.for_prompts)
        self.count("state in a snapshot", sum(request.prompt_state != NO_SNAPSHOT for request in running))
        for tracked in chain.engine.registry.all():
            request, handle = tracked.request, self._wires.of(tracked.request)
            if request.evictions > self._evictions[handle]:
                self._evictions[handle] = request.evictions
                self.count("evicted as often as any may be", request.is_protected)
                self.count("evicted by a higher priority", any(row.priority > request.priority for row in running))
                self.count("row with a grammar evicted", request.may_hold)
                if request.sampling.has_penalty:
                    self.count("penalised row evicted")
                    left = self._penalty_slot_of.get(handle, NO_SLOT)  # none if it had it for no whole turn
                    self._left_by_evicted[left] = handle
                self.count("prompt log-probabilities after an eviction", request.wants_prompt_logprobs)
        for request in running:
            self.count("readmitted with a cached prefix", request.evictions > 0 and request.shared > 0)
            if self._begun_with.get(handle := self._wires.of(request)) != (begins := request.begins_as):
                self._begun_with[handle] = begins
                self.count("evicted row began with a snapshot", begins != NO_SNAPSHOT and request.evictions > 0)
            tokens = chain.engine.scheduler.limits.snapshot_tokens
            reached = request.snapshots[: (request.max_len - 1) // tokens] if tokens else ()
            passed = request.shared // max(1, chain.engine.scheduler.holdings.snapshots.every)
            self.count("border without a snapshot, for want of one", NO_SNAPSHOT in reached[passed:])
            self._look_at_slots(self._wires.of(request), request.penalty_slot, request.state_slot)

    def _look_at_slots(self, handle: int, penalty_slot: int, state_slot: int) -> None:
        if penalty_slot != NO_SLOT:
            self._penalty_slot_of[handle] = penalty_slot
            if self._left_by_evicted.get(penalty_slot, handle) != handle:
                self.count("its penalty slot reused")
                del self._left_by_evicted[penalty_slot]
        if state_slot != NO_SLOT:
            self.count("state slot reused", self._state_slots.get(state_slot, handle) != handle)
            self._state_slots[state_slot] = handle

    def drained(self, chain: SimulatedChain) -> None:
        """After a drain, which has compared the device's rows with the host's."""
        scheduler = chain.engine.scheduler
        self.count("row compared", len(scheduler.holdings.requests()))
        self.count("paused row compared", len(scheduler.holdings.paused))

    def close(self, chain: SimulatedChain, transcript: Transcript, book: Book, longest_stall: int) -> None:
        """At the end of a run."""
        stats = chain.engine.stats()
        self.longest_stall = longest_stall
        self.count(f"mode: {self._script.world.mode}")
        self.count(f"depth {chain.ledger.run_ahead}")
        for place, times in stats.launches_by_depth.items():
            self.count(f"launch queued as number {place} of those not committed", times)
        for kind, event in stats.events.items():
            self.count(f"lifecycle: {kind}", event.count)
            self.count(f"chain held by: {kind}", event.held)
        tables = {
            "ended from outside": stats.aborted,
            "finished": stats.finished,
            "barrier": stats.barriers,
            "launch": {
                **stats.launches_by_kind,
                "overlapped": stats.overlapped,
                "first after idle": stats.firsts_after_idle,
            },
            "blocks": {
                "reserved": stats.blocks_reserved,
                "adopted": stats.blocks_adopted,
                "returned": stats.blocks_returned,
            },
            "abort answered": transcript.outcomes,
        }
        for name, table in tables.items():
            for what, times in table.items():
                self.count(f"{name}: {what}", times)
        for what, times in book.counts.items():
            self.count(what, times)
        for why, times in chain.ledger.forms.items():
            if why:
                self.count(why, times)
        self.count("void rows", stats.void_rows)
        self.count("row held", stats.held_rows)
        self.count("row with a state held", stats.held_rows * (self._script.world.mode is Mode.STATE))
        if chain.masks is not None:
            self.count("grammar followed to its end", stats.finished.get("END_OF_SEQUENCE", 0))
            self.count("forced token kept", sum(stats.accepted.values()))
        self.count("deferred releases", stats.deferred_releases)
        self.count("held back", stats.held_back)
        self.count("recomputed tokens", stats.recomputed_tokens)
        self.count("front end lost", stats.front_ends_lost)
        self.count("cached block reused", chain.pool.reused)
        self.count("fenced block found", chain.pool.revived)
        self.count("block shared", chain.pool.shared)
        snapshots = chain.engine.scheduler.holdings.snapshots
        self.count("snapshot kept", stats.snapshots_kept)
        self.count("row began with a snapshot", stats.snapshots_found)
        self.count("snapshot given out again", max(0, snapshots.allocated_total - snapshots.total))
        if isinstance(chain.program, StateProgram):
            self.count("border inside a run", chain.program.borders_in_runs)
            self.count("run of a row that is held", chain.program.held_runs)
        self.count("slow device waited for", chain.device.pauses)
        self.count("snapshot logged", len(chain.snapshots))
        self._close_requests(transcript)
        if isinstance(chain.program, DraftProgram):
            for tokens, times in chain.program.runs.items():
                self.count(f"run of {tokens}", times)
            self.count("run trimmed inside", chain.program.trimmed)

    def _close_requests(self, transcript: Transcript) -> None:
        has_cache = self._script.world.prefix_cache
        for handle, heard in list(transcript.heard.items()):
            ask = self._script.asks[handle]
            self.count("cache hit", heard.cached_tokens > 0)
            self.count("shared blocks found without a prefix cache", heard.cached_tokens and not has_cache)
            first = transcript.heard[handle - ask.index]
            is_alone = ask.index > 0 and first.unheard and not first.tokens and bool(heard.tokens)
            self.count("first completion ended before its prompt was shared", is_alone)
            self.count("prompt log-probabilities", len(heard.prompt_entries))
            for what, is_so in _how_drawn(ask).items():
                self.count(f"drawn {what}", is_so * len(heard.tokens))
            if heard.refusal is not None:
                self.count(f"refused: {heard.refusal.code}")
            if heard.reason is FinishReason.NON_FINITE:
                in_prompt = 0 <= ask.sick_hidden < len(ask.prompt)
                self.count("non-finite row", ask.sick_hidden < 0)
                self.count("non-finite chunk", in_prompt)
                self.count("non-finite hidden state in decode", ask.sick_hidden >= 0 and not in_prompt)


def _how_drawn(ask: Ask) -> dict[str, bool]:
    return {
        "greedily": ask.temperature == 0,
        "at a temperature": ask.temperature not in (0, 1),
        "with filters": ask.temperature > 0 and (ask.top_k > 0 or ask.top_p < 1 or ask.min_p > 0),
        "with a bias": bool(ask.bias),
        "from allowed tokens": bool(ask.allowed),
        "with a minimum length": ask.min_tokens > 0,
        "with penalties": ask.sampling.has_penalty,
        "with log-probabilities": ask.logprobs >= 0,
    }


def as_lines(counts: Counter[str]) -> list[str]:
    """A table, in the order of its names."""
    return [f"{counts[what]:>10,}  {what}" for what in sorted({*counts, *WANTED})]
