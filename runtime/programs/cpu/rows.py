"""Row state in ordinary memory, and S's and apply's changes to it, in NumPy.

The host device and the simulated device share it; on CUDA the same steps are kernels
(`runahead.runtime.kernels.triton`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import (
    FAULT_PLAN_NUMBER,
    FORCED,
    HELD,
    NON_FINITE,
    NOTHING_LEFT,
    STATUS_FAULT,
    STOPPED,
    VOID,
    RingMemory,
    cell_tag,
)
from runahead.runtime import plan as layout
from runahead.runtime.drafters.ngram import NO_DRAFT, Drafter
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.plan import PlanView, read_plan
from runahead.runtime.programs.cpu.inputs import PromptQueries, Queries, prompt_queries_of, queries_of
from runahead.runtime.row_record import (
    COUNT_SEEN,
    COUNT_TOKEN,
    PENALTY_TENSORS,
    PROMPT_BIT,
    ROW_RECORD,
    ROW_TENSORS,
    RowParameters,
    mask_words,
    read_admission,
    token_mask,
)

_NO_ROWS = np.zeros(0, np.int64)


class HostRows(RowParameters[NDArray[Any]]):
    """The device's row state by row slot: the fields of `runahead.runtime.kernels.row_state.RowState` as NumPy arrays.

    snapshot_tokens: tokens between two boundaries with a snapshot; 0: none. launched: the number before the first
    launch's. drafter: gets every token of the rows and proposes drafts; None: no launch has drafts. masks: of rows with
    a grammar; None: no row has one.
    """

    def __init__(
        self, rings: RingMemory, max_rows: int, max_blocks: int, vocab_size: int, block_size: int, max_stop_ids: int,
        max_bias: int, *, penalty_slots: int = 0, launched: int = 0, drafter: Drafter | None = None,
        masks: MaskMemory | None = None, snapshot_tokens: int = 0,
    ) -> None:  # fmt: skip
        slots = max_rows + 1
        assert not snapshot_tokens or rings.layout.drafts < snapshot_tokens, "drafts may not reach two boundaries"
        self.max_blocks = max_blocks
        self.snapshot_tokens = snapshot_tokens
        boundaries = max_blocks * block_size // snapshot_tokens if snapshot_tokens else 0
        self.rings = rings
        self.drafter = drafter
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.number = launched  # the launch now running
        self.rows = _NO_ROWS  # slots of the last plan's rows, int64 [rows]
        self.samples = np.zeros(0, np.bool_)  # which of them the next S samples
        self.chunks: NDArray[np.int32] = np.zeros((0, layout.CHUNK_WORDS), np.int32)
        # Drafts of a row's last F, and their number.
        self.proposed = np.full((slots, rings.layout.drafts), NO_DRAFT, np.int32)
        self.drafted = np.zeros(slots, np.int32)
        self.forced = np.zeros(slots, np.bool_)  # whether the row's grammar forces them
        self.most_drafts = 0  # of a row in this launch's F
        self.most_guesses = 0  # of these, guesses of the drafter
        self.last_token = np.zeros(slots, np.int32)
        self.seq_len = np.zeros(slots, np.int32)
        self.state_len = np.zeros(slots, np.int32)  # tokens that the row's recurrent state covers; written by F
        self.alive = np.zeros(slots, np.bool_)
        self.held = np.zeros(slots, np.bool_)  # the row's newest S had no mask for its position
        self.block_table = np.zeros((slots, max_blocks + boundaries), np.int32)  # a row's snapshots follow its blocks
        free = np.frombuffer(ROW_RECORD.free(), np.int32)
        self.parameters = np.tile(free, (slots, 1))
        for name, column in ROW_RECORD.columns(self.parameters).items():
            setattr(self, name, column)
        self.stop_ids = np.full((slots, max_stop_ids), -1, np.int32)
        self.bias_ids = np.zeros((slots, max_bias), np.int32)
        self.bias_values = np.zeros((slots, max_bias), np.float32)
        self.allowed = np.zeros((slots, mask_words(vocab_size)), np.int32)
        self.masks = masks
        # By penalty slot, as `runahead.runtime.kernels.row_state.PenaltyState`.
        self.counts = np.zeros((penalty_slots + 1, vocab_size), np.int32)
        self.in_prompt = np.zeros((penalty_slots + 1, mask_words(vocab_size)), np.int32)

    # ------------------------------------------------------------ S

    def begin(self) -> int:
        """Begin the next launch. Returns its number."""
        self.number += 1
        self.rings.status[self.rings.slot(self.number), STATUS_FAULT] = 0
        return self.number

    def to_sample(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return indexes in the row list, and slots, of the rows that this S samples."""
        indexes = np.flatnonzero(self.samples)
        return indexes, self.rows[indexes]

    def judged(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], drafts: int
    ) -> tuple[NDArray[np.intp], NDArray[np.int64], dict[int, list[NDArray[np.int32]]]]:
        """Return the rows that S samples now, and the masks of those with a grammar, by row slot: for the row's next
        position and for those behind its drafts, up to the first missing one.

        Tags of masks are read only here in a launch. A row whose next mask is missing is held: its cell says so, its
        state does not change, this launch's F skips it, and a later S finds its logits unchanged. A draft without a
        mask behind it is dropped, with all later ones. drafts: most drafts of a row in the previous F.
        """
        goes_on = np.ones(slots.size, np.bool_)
        structured = np.flatnonzero((self.mask_epoch[slots] != 0) & self.alive[slots])
        masks: dict[int, list[NDArray[np.int32]]] = {}
        if structured.size:
            assert self.masks is not None, "a row with a grammar was admitted without a mask worker"
            rows = slots[structured]
            there, found = self.masks.read_next(rows, self.mask_epoch[rows], self.seq_len[rows])
            goes_on[structured] = there
            masks = {slot: [mask] for slot, mask in zip(rows[there].tolist(), found[there], strict=True)}
            self._read_masks(rows[there], masks, drafts)
        self.held[slots] = ~goes_on
        if not goes_on.all():
            ring, held = self.rings.slot(self.number), indexes[~goes_on]
            self.rings.cells[ring, held] = cell_tag(self.number) | VOID
            self.rings.cells[ring, held, 0] = cell_tag(self.number) | HELD
            self.rings.drafted[ring, held] = 0
            indexes, slots = indexes[goes_on], slots[goes_on]
        return indexes, slots, masks

    def _read_masks(self, slots: NDArray[np.int64], masks: dict[int, list[NDArray[np.int32]]], drafts: int) -> None:
        """Append the masks behind these rows' drafts, [n], up to the first missing one. drafts: of a row, at most."""
        if not drafts:
            self.proposed[slots], self.drafted[slots] = NO_DRAFT, 0
            return
        assert self.masks is not None
        for slot in slots.tolist():
            found, epoch, length = masks[slot], int(self.mask_epoch[slot]), int(self.seq_len[slot])
            for count in range(1, 1 + min(int(self.drafted[slot]), drafts)):
                mask = self.masks.read_behind(slot, epoch, length, self.proposed[slot, :count])
                if mask is None:
                    break
                found.append(mask)
            self.proposed[slot, len(found) - 1 :] = NO_DRAFT
            self.drafted[slot] = len(found) - 1

    def advance(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        """Advance the rows by their tokens [n]: update counts of rows with penalties, end the rows that stop, and write
        result cell number `offset` of each row. nothing_left: [n] rows whose grammar allows no token; None: none.

        A row that had ended does not change; its cell is void. Tokens become readable with the cell's store.
        """
        alive = self.alive[slots]
        position = self.seq_len[slots]
        ends = (position >= self.min_position[slots]) | (self.mask_epoch[slots] != 0)
        stops = self._are_stops(slots, tokens[:, None])[:, 0] & ends
        good = finite if nothing_left is None else finite & ~nothing_left
        stopped = stops | (position >= self.max_position[slots]) | ~good
        kept = alive & good
        self.last_token[slots] = np.where(alive, tokens, self.last_token[slots])
        self.seq_len[slots] = position + kept
        self.alive[slots] = alive & ~stopped
        counting = kept & (self.penalty_slot[slots] >= 0)
        if np.count_nonzero(counting):
            self.counts[self.penalty_slot[slots[counting]], tokens[counting]] += 1
        if self.drafter is not None:
            self.drafter.took(slots[kept], position[kept].astype(np.int64), tokens[kept])
        cells = self.rings.cells[self.rings.slot(self.number)]
        cells[indexes, offset] = self._cells(tokens, stopped, finite, alive)
        if nothing_left is not None:
            cells[indexes[alive & nothing_left], offset] |= NOTHING_LEFT

    def begin_verified(self, indexes: NDArray[np.intp], slots: NDArray[np.int64], count: int) -> None:
        """Begin S with at most `count` drafts of each row. Cells without a token are void."""
        ring = self.rings.slot(self.number)
        self.rings.cells[ring, indexes, : 1 + count] = cell_tag(self.number) | VOID
        verified = np.minimum(self.drafted[slots], count)
        self.rings.drafted[ring, indexes] = verified + FORCED * (self.forced[slots] & (verified > 0))

    def goes_on(self, slots: NDArray[np.int64], tokens: NDArray[np.int32], offset: int) -> NDArray[np.bool_]:
        """Return which rows have a token, number `offset`, that equals the draft: the logits for the next one are
        there. [n], [n]"""
        going: NDArray[np.bool_] = self.alive[slots] & (self.proposed[slots, offset] == tokens)
        return going

    def advance_verified(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_]
    ) -> None:
        """Advance each row by several tokens: its first one, and each one behind an accepted draft that did not end the
        row.

        tokens, finite: [n, 1 + K], sampled as if all earlier drafts had been accepted. Entries beyond a row's drafts
        are ignored.
        """
        width = tokens.shape[1]
        offsets = np.arange(width)
        position = self.seq_len[slots, None] + offsets
        stops = self._are_stops(slots, tokens)
        stops &= position >= self.min_position[slots, None]
        stopped = stops | (position >= self.max_position[slots, None]) | ~finite
        goes_on = (self.proposed[slots, : width - 1] == tokens[:, :-1]) & ~stopped[:, :-1]
        count = self.alive[slots] * (1 + np.logical_and.accumulate(goes_on, axis=1).sum(axis=1))  # [n] cells
        in_run = offsets < count[:, None]
        kept = in_run & finite
        cells = self.rings.cells[self.rings.slot(self.number)]
        cells[indexes, :width] = self._cells(tokens, stopped, finite, in_run)
        row, offset = kept.nonzero()
        if self.drafter is not None:
            self.drafter.took(slots[row], position[row, offset], tokens[row, offset])
        penalty_slot = self.penalty_slot[slots[row]]
        if np.count_nonzero(penalty_slot >= 0):
            counted = penalty_slot >= 0
            np.add.at(self.counts, (penalty_slot[counted], tokens[row, offset][counted]), 1)
        row = count.nonzero()[0]
        slots, last = slots[row], count[row] - 1
        self.last_token[slots] = tokens[row, last]
        self.seq_len[slots] += kept[row].sum(axis=1, dtype=np.int32)
        self.alive[slots] = ~stopped[row, last]

    def _are_stops(self, slots: NDArray[np.int64], tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens, [n, width], are stop ids of their rows, [n]."""
        most = int(self.stop_count[slots].max(initial=0))
        found: NDArray[np.bool_] = (self.stop_ids[slots, None, :most] == tokens[:, :, None]).any(2)
        return found

    def _cells(
        self, tokens: NDArray[np.int32], stopped: NDArray[np.bool_], finite: NDArray[np.bool_], kept: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return result cells of tokens, void where they are not kept."""
        low = tokens.astype(np.int64)
        low |= np.where(stopped, STOPPED, 0)
        low |= np.where(finite, 0, NON_FINITE)
        low = np.where(kept, low, VOID)
        return cell_tag(self.number) | low

    # ------------------------------------------------------------ apply

    def apply(self) -> int:
        """Apply the plan in this launch's staging slot. Returns the bytes read.

        A plan with another number masks every row and leaves FAULT_PLAN_NUMBER in the result slot.
        """
        slot = self.rings.slot(self.number)
        plan = read_plan(self.rings.plan[slot])
        if plan.number != self.number:
            self.rings.status[slot, STATUS_FAULT] = FAULT_PLAN_NUMBER
            self.rows, self.samples = _NO_ROWS, np.zeros(0, np.bool_)
            self.chunks, self.most_drafts, self.most_guesses = self.chunks[:0], 0, 0
            return 4 * layout.HEADER_WORDS
        bulk = self.rings.bulk[slot]
        for offset in plan.admissions.tolist():
            self._admit(bulk, offset)
        appends = plan.appends
        self.block_table[appends[:, 0], appends[:, 1]] = appends[:, 2]
        self._apply_rows(plan, bulk)
        self.most_drafts, self.most_guesses = plan.drafts, plan.guesses
        return plan.bytes_read

    def _apply_rows(self, plan: PlanView, bulk: NDArray[np.int32]) -> None:
        if plan.rows is not None:
            self.rows = plan.rows.astype(np.int64)
            self.samples = np.ones(self.rows.size, np.bool_)
        self.chunks = plan.chunks.copy()
        for row, start, count, offset, samples in self.chunks.tolist():
            self.samples[row] = samples
            self.seq_len[self.rows[row]] = start + count
            if self.drafter is not None:
                self.drafter.read(int(self.rows[row]), start, bulk[offset : offset + count])

    def _admit(self, bulk: NDArray[np.int32], offset: int) -> None:
        record = read_admission(bulk, offset)
        slot = record.word("row_slot")
        self.parameters[slot] = record.head
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : record.stop_ids.size] = record.stop_ids
        self.bias_ids[slot, : record.bias_ids.size] = record.bias_ids
        self.bias_values[slot, : record.bias_values.size] = record.bias_values
        self.allowed[slot, : record.allowed.size] = record.allowed
        self.block_table[slot] = 0
        self.block_table[slot, : record.blocks.size] = record.blocks
        penalty_slot = int(self.penalty_slot[slot])
        if penalty_slot >= 0:
            self._begin_penalties(penalty_slot, record.counts)
        if self.drafter is not None:
            self.drafter.read(slot, 0, record.history)
        self.seq_len[slot] = 0
        self.alive[slot] = True
        self.held[slot] = False
        self._forget_drafts(np.array([slot]))

    def _begin_penalties(self, penalty_slot: int, entries: NDArray[np.int32]) -> None:
        """Replace the previous row's counts in this slot."""
        token, seen = entries[:, COUNT_TOKEN], entries[:, COUNT_SEEN]
        self.counts[penalty_slot] = 0
        self.counts[penalty_slot, token] = seen & ~PROMPT_BIT
        self.in_prompt[penalty_slot] = token_mask(token[(seen & PROMPT_BIT) != 0], self.vocab_size)

    def poison_penalty_slot(self, slot: int) -> None:
        """Fill the slot with high counts, so that late readers are noticed."""
        self.counts[slot] = 1 << 20
        self.in_prompt[slot] = -1

    def read(self) -> Mapping[str, NDArray[np.generic]]:
        """Return row state, penalty state and the drafter's memory by field name: the arrays themselves, valid until
        the next launch."""
        own = {name: getattr(self, name) for name in (*ROW_TENSORS, *PENALTY_TENSORS)}
        if self.snapshot_tokens:
            own["snapshots"] = self.block_table[:, self.max_blocks :]
        return own if self.drafter is None else {**own, **self.drafter.memory()}

    # ------------------------------------------------------------ draft

    def draft(self) -> None:
        """Draft tokens for F's decode rows: tokens that their grammars force, else the drafter's, in the number that
        the plan asks for. Tokens at a row's end or beyond it are left out, since no block is reserved for them."""
        if not self.most_drafts and not np.count_nonzero(self.drafted):
            return
        # A held row keeps its logits and drafts of an earlier F.
        fresh = self.rows[~self.held[self.rows]]
        self._forget_drafts(fresh)
        decodes = self.alive[fresh]
        if self.chunks.size:
            decodes &= ~np.isin(fresh, self.rows[self.chunks[:, layout.CHUNK_ROW]])
        slots = fresh[decodes]
        proposed = self._proposed_to(slots)
        there = proposed != NO_DRAFT
        there &= np.arange(self.most_drafts) < (self.max_position[slots] - self.seq_len[slots])[:, None]
        self.proposed[slots, : self.most_drafts] = np.where(there, proposed, NO_DRAFT)
        self.drafted[slots] = there.sum(axis=1)

    def _proposed_to(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return proposed tokens of these rows, [n]; NO_DRAFT behind the last one. [n, most drafts]"""
        proposed = np.full((slots.size, self.most_drafts), NO_DRAFT, np.int32)
        if self.masks is not None:
            for i in np.flatnonzero(self.mask_epoch[slots]).tolist():
                slot = int(slots[i])
                epoch, length = int(self.mask_epoch[slot]), int(self.seq_len[slot])
                tokens = self.masks.read_forced(slot, epoch, length, int(self.last_token[slot]), self.most_drafts)
                proposed[i, : tokens.size] = tokens
                self.forced[slot] = tokens.size > 0
        guessed = ~self.forced[slots]
        if self.most_guesses and guessed.any():
            assert self.drafter is not None, "a plan asks for guesses, and the program has no drafter"
            lengths = self.seq_len[slots[guessed]].astype(np.int64)
            proposed[guessed, : self.most_guesses] = self.drafter.propose(slots[guessed], lengths, self.most_guesses)
        return proposed

    def _forget_drafts(self, slots: NDArray[np.int64]) -> None:
        """Remove the drafts of these rows. [n]"""
        self.proposed[slots], self.drafted[slots], self.forced[slots] = NO_DRAFT, 0, False

    # ------------------------------------------------------------ inputs of F

    def queries(self) -> Queries:
        """Return the query tokens of this launch's F."""
        return queries_of(self)

    def prompt_queries(self, queries: Queries) -> PromptQueries:
        """Return the query tokens of this launch that leave prompt log-probabilities."""
        return prompt_queries_of(self, queries)

    # ------------------------------------------------------------ results of F

    def write_finite(self, finite: NDArray[np.bool_], queries: Queries) -> None:
        """Write the flag of every row of F. finite: [T], True for a query token with a finite final hidden state and,
        if it leaves prompt log-probabilities, finite logits.

        A masked row counts as finite.
        """
        if queries.query_start_loc[-1] != queries.slots.size:
            finite = np.logical_and.reduceat(finite, queries.query_start_loc[:-1])
        flags = self.rings.finite[self.rings.slot(self.number), : queries.slots.size]
        np.logical_or(finite, queries.seq_lens == 0, out=flags, casting="unsafe")

    def leave_states(self, slots: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """Set the lengths of these rows' recurrent states. [n], [n]"""
        self.state_len[slots] = lengths

    def write_prompt_logprobs(
        self, indexes: NDArray[np.int64], chosen: NDArray[np.float32], top_ids: NDArray[np.int32],
        top: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Write log-probabilities of prompt tokens into entries `indexes` [n]. [n], [n, max_top], [n, max_top]"""
        slot = self.rings.slot(self.number)
        self.rings.prompt_logprob[slot, indexes] = chosen
        self.rings.prompt_top_ids[slot, indexes] = top_ids
        self.rings.prompt_top_logprobs[slot, indexes] = top
