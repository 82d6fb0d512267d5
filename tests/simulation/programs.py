"""The hash model as the simulator runs it: logits and hidden states of some requests are not finite, and every write of
a live row must find a block.

What is not finite lies in the KV cache as such, so that whoever attends to it, by right or through a block that should
never have been found, fails as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime import plan as layout
from runahead.runtime.drafters.ngram import Drafter
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.programs.cpu.inputs import NOWHERE, Queries, StateSlots, slot_of_snapshot, state_slots_of
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.programs.cpu.sampler import draft, take_over_sampled
from runahead.runtime.row_record import read_admission
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS
from tests.runtime.programs.hash_program import HashProgram
from tests.simulation.oracle import STATE_INIT, next_state, state_digest

_NAN = -(1 << 21)  # in a KV block: what was computed there is not finite
NOT_FINITE: Final = -1  # in place of a token, of a state that is not finite from there on
_POISONED_STATE = 0xDEAD


class NoBlockForAWrite(AssertionError):
    """A live row was to write a token where its block table has no block."""


class SampledTwice(AssertionError):
    """A token of a request that goes on was sampled once more: it was thrown away when its row was evicted."""


@dataclass(frozen=True, slots=True)
class Sickness:
    """Positions of a request at which its logits, or the hidden state of its query token, are not finite. -1: none."""

    logits: int
    hidden: int


class SimulatedRows(HostRows):
    """Row state that knows sick requests by their seed."""

    def __init__(
        self, rings: RingMemory, max_rows: int, *sizes: int, penalty_slots: int, launched: int = 0,
        masks: MaskMemory | None = None, snapshot_tokens: int = 0, drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            rings, max_rows, *sizes, penalty_slots=penalty_slots, launched=launched, masks=masks,
            snapshot_tokens=snapshot_tokens, drafter=drafter,
        )  # fmt: skip
        self.sickness: Mapping[int, Sickness] = {}
        self.sick = np.zeros(max_rows + 1, np.bool_)  # the last F left the row logits that are not finite
        self._newest: dict[int, int] = {}  # position of the newest token that was sampled, by the request's seed

    def _admit(self, bulk: NDArray[np.int32], offset: int) -> None:
        super()._admit(bulk, offset)
        self.sick[read_admission(bulk, offset).word("row_slot")] = False

    def sickness_of(self, slot: int) -> Sickness | None:
        return self.sickness.get(int(self.seed[slot])) if self.sickness else None

    def has_finite_logits(self, slot: int, position: int) -> bool:
        """Of the token at this position, if S samples it now."""
        sickness = self.sickness_of(slot)
        return not self.sick[slot] and (sickness is None or sickness.logits != position)

    def advance(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        for i, slot in enumerate(slots.tolist()):
            finite[i] = self.has_finite_logits(slot, int(self.seq_len[slot]))
            if self.alive[slot]:
                self.sampled(slot)
        super().advance(indexes, slots, tokens, finite, offset, nothing_left)

    def sampled(self, slot: int) -> None:
        """A live row is about to get its next token. Raises SampledTwice."""
        seed, position = int(self.seed[slot]), int(self.seq_len[slot])
        if self._newest.get(seed, -1) >= position:
            raise SampledTwice(f"launch {self.number}: row {slot} had its token at {position} before")
        self._newest[seed] = position

    def queries(self) -> Queries:
        queries = super().queries()
        self.check_blocks(queries, np.ones(queries.positions.size, np.bool_))
        return queries

    def check_blocks(self, queries: Queries, written: NDArray[np.bool_]) -> None:
        """Every query token of a live row that is `written` [T] goes to a block of its own."""
        counts = np.diff(queries.query_start_loc)
        live = np.repeat(queries.seq_lens > 0, counts) & written
        homeless = np.flatnonzero(live & (queries.slot_mapping < self.block_size))
        if homeless.size:
            slot = int(np.repeat(queries.slots, counts)[homeless[0]])
            position = int(queries.positions[homeless[0]])
            raise NoBlockForAWrite(f"launch {self.number}: row {slot} has no block for its position {position}")


class SimulatedProgram(HashProgram):
    """sickness: of requests, by their seed. sizes: as of `HashProgram`. Of several ranks each samples for itself, but
    where rows may have a grammar: there the first rank reads the masks and drafts, and the others copy its rows.

    ranks: set where there are several. overwritten: masks that the first rank read and that were no longer there when
    this rank came to the same S.
    """

    rows: SimulatedRows

    def __init__(
        self, rings: RingMemory, *, sickness: Mapping[int, Sickness], snapshot_tokens: int = 0, **sizes: Any
    ) -> None:
        super().__init__(rings, **sizes)
        max_blocks = -(-sizes["context_length"] // sizes["block_size"])
        self.rows = self.make_rows(
            rings, sizes["max_rows"], max_blocks, sizes["vocab_size"], sizes["block_size"], MAX_STOP_IDS, MAX_BIAS,
            penalty_slots=sizes.get("penalty_slots", 0), launched=sizes.get("launched", 0), masks=sizes.get("masks"),
            snapshot_tokens=snapshot_tokens, drafter=sizes.get("drafter"),
        )  # fmt: skip
        self.rows.sickness = sickness
        self._any_sick = bool(sickness)
        self._masks: MaskMemory | None = sizes.get("masks")
        self.ranks: Ranks = ONE_RANK
        self.overwritten = 0

    make_rows: type[SimulatedRows] = SimulatedRows

    def follow(self, ranks: Ranks) -> None:
        """Be one of several ranks."""
        self.ranks = ranks
        if not ranks.shard.is_first:
            self.rows.masks = self.rows.drafter = None

    def copies(self, shape: LaunchShape) -> bool:
        """Return whether the ranks copy what S of this launch does to the first rank's rows."""
        return self._masks is not None and shape.form is Form.FULL and not self.ranks.shard.is_whole

    def sample(self, shape: LaunchShape) -> None:
        if not self.copies(shape):
            super().sample(shape)
            return
        _, slots = self.rows.to_sample()
        self._check_logits(slots)
        lengths = self.rows.seq_len[slots]
        if self.ranks.shard.is_first:
            super().sample(shape)
        else:
            self.rows.begin()
        take_over_sampled(self.rows, slots, self.ranks)
        self._count_overwritten(slots, lengths)

    def draft(self) -> None:
        draft(self.rows, self.ranks)

    def _check_logits(self, slots: NDArray[np.int64]) -> None:
        """Every rank has the first one's logits of these rows [n] and of their drafts."""
        here = np.arange(self._hashes.shape[1]) <= self.rows.drafted[slots, None]
        own = np.where(here & self.rows.alive[slots, None], self._hashes[slots], np.uint64(0))
        first = own.copy()
        self.ranks.spread(first.view(np.int32))
        differs = np.flatnonzero(((own != first) & (first != 0)).any(1))
        assert not differs.size, f"launch {self.rows.number + 1}: row {slots[differs[0]]} has other logits than rank 0"

    def _count_overwritten(self, slots: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """Count masks of these rows, with these lengths before S, that are no longer there. [n], [n]"""
        assert self._masks is not None
        judged = (self.rows.mask_epoch[slots] != 0) & ~self.rows.held[slots] & (self.rows.seq_len[slots] > lengths)
        there, _ = self._masks.read_next(slots[judged], self.rows.mask_epoch[slots[judged]], lengths[judged])
        self.overwritten += int(np.count_nonzero(~there))

    def finite_tokens(self, queries: Queries) -> NDArray[np.bool_]:
        """Which query tokens [T] are finite: sick ones are not, nor is what attends to one, and none of their KV is."""
        finite = super().finite_tokens(queries)
        if not self._any_sick:
            return finite
        for row, slot in enumerate(queries.slots.tolist()):
            begin, end = queries.query_start_loc[row : row + 2].tolist()
            if queries.seq_lens[row]:
                positions = queries.positions[begin:end]
                self._mark_sick(slot, queries.slot_mapping[begin:end], positions)
                reached = np.maximum.accumulate(self._cached(slot, int(positions[-1]) + 1) == _NAN)
                finite[begin:end] = ~reached[np.minimum(positions, reached.size - 1)]
                self._leave_sickness(slot, finite[begin:end])
        return finite

    def _leave_sickness(self, slot: int, finite: NDArray[np.bool_]) -> None:
        """finite: of the row's query tokens, whose last one leaves the logits."""
        self.rows.sick[slot] = not finite[-1]

    def _mark_sick(self, slot: int, mapping: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        sickness = self.rows.sickness_of(slot)
        if sickness is not None:
            self.cache.reshape(-1)[mapping[positions == sickness.hidden]] = _NAN

    def _cached(self, slot: int, length: int) -> NDArray[np.int64]:
        """What the cache holds at the row's first positions. [length]"""
        blocks = self.rows.block_table[slot, : -(-length // self.rows.block_size)]
        found: NDArray[np.int64] = self.cache[blocks].reshape(-1)[:length]
        return found

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return {
            **super().read_rows(),
            "penalty_slot": self.rows.penalty_slot.copy(),
            "state_slot": self.rows.state_slot.copy(),
        }


class StateProgram(SimulatedProgram):
    """A recurrent state a row, by state slot, beside the cache: each token is a hash of both. F alone writes it, and of
    live rows only. Drafts are in no state before S has kept them."""

    def __init__(
        self, rings: RingMemory, *, sickness: Mapping[int, Sickness], snapshots: int, snapshot_tokens: int, **sizes: Any
    ) -> None:
        super().__init__(rings, sickness=sickness, snapshot_tokens=snapshot_tokens if snapshots else 0, **sizes)
        indexes = sizes["max_rows"] + snapshots
        self.states = [_POISONED_STATE] * indexes
        self.seen: list[tuple[int, ...]] = [()] * indexes  # what each state is of, by token; NOT_FINITE for a sick one

        self.kept: list[list[int]] = [[]] * sizes["max_rows"]  # drafts of the row's newest run, by state slot
        self._run_states: dict[int, list[int]] = {}  # by row slot, behind each token that S may sample from
        self.borders_in_runs = 0  # snapshots of states that drafts had reached
        self.held_runs = 0  # times that a row with drafts was held

    def written(self, queries: Queries) -> None:
        indexes = state_slots_of(self.rows, queries)
        chunks = set(self.rows.chunks[:, layout.CHUNK_ROW].tolist())
        for row, slot in enumerate(queries.slots.tolist()):
            begin, end = queries.query_start_loc[row : row + 2].tolist()
            if queries.seq_lens[row]:
                tokens = queries.token_ids[begin:end].tolist()
                sickness = self.rows.sickness_of(slot)
                sick = -1 if sickness is None else sickness.hidden - int(queries.positions[begin])
                self._go_on(indexes, row, slot, tokens, sick, queries.positions[begin] == 0, row in chunks)
            else:
                self.held_runs += bool(self.rows.held[slot] and self.rows.alive[slot] and self.rows.drafted[slot])
        self.rows.leave_states(queries.slots, indexes.lengths)

    def _go_on(
        self, indexes: StateSlots, row: int, slot: int, tokens: list[int], sick: int, is_first: bool,
        is_chunk: bool,
    ) -> None:  # fmt: skip
        """Token by token, by those of the run before that were kept, and then by the row's query tokens. sick: which of
        the latter is not finite, if it is one of them."""
        source, own, certain = int(indexes.read_from[row]), int(indexes.slots[row]), int(indexes.certain[row])
        state, seen = (STATE_INIT, ()) if is_first else (self.states[source], self.seen[source])
        is_slot = own < len(self.kept)  # not a snapshot, which has no room for drafts
        again = self.kept[own][: indexes.replayed[row]] if is_slot else []
        assert len(again) == indexes.replayed[row], "more is replayed than was kept"
        found = [(state, seen)]
        for at, token in enumerate((*again, *tokens), -len(again)):
            state, seen = next_state(state, token), (*seen, NOT_FINITE if at == sick and at >= 0 else token)
            found.append((state, seen))
        self.states[own], self.seen[own] = found[len(again) + certain]
        if (snapshot := int(indexes.copied_to[row])) != NOWHERE:
            self.states[snapshot], self.seen[snapshot] = found[int(indexes.copied_after[row])]
            self.borders_in_runs += indexes.copied_after[row] <= len(again)
        assert is_slot or certain == len(tokens), "a row has drafts while its state is in a snapshot"
        if is_slot:
            self.kept[own] = tokens[certain:]
        behind = found[-1:] if is_chunk else found[len(again) + 1 :]
        self._run_states[slot] = [state for state, _ in behind]

    def _hash(self, slot: int, drafts: int = 0) -> np.uint64:
        return np.uint64(int(super()._hash(slot, drafts)) ^ state_digest(self._run_states[slot][drafts]))

    def poison_state_slot(self, slot: int) -> None:
        """Nonsense into a state slot that nobody may name any more."""
        self.states[slot] = _POISONED_STATE
        self.kept[slot] = []

    def poison_snapshots(self, snapshots: tuple[int, ...]) -> None:
        """Nonsense into snapshots that nobody may name any more."""
        for snapshot in snapshots:
            self.states[slot_of_snapshot(self.rows, snapshot)] = _POISONED_STATE
