"""Row state in ordinary memory, and what S and apply do to it, in NumPy.

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
    NON_FINITE,
    STATUS_FAULT,
    STOPPED,
    VOID,
    RingMemory,
    cell_tag,
)
from runahead.runtime import plan as layout
from runahead.runtime.plan import PlanView, read_plan
from runahead.runtime.programs.host_queries import PromptQueries, Queries, prompt_queries_of, queries_of
from runahead.runtime.row_record import (
    COUNT_SEEN,
    COUNT_TOKEN,
    PENALTY_TENSORS,
    PROMPT_BIT,
    ROW_RECORD,
    ROW_TENSORS,
    RowParameters,
    read_admission,
)
from runahead.runtime.token_mask import mask_words, token_mask

_NO_ROWS = np.zeros(0, np.int64)


class HostRows(RowParameters[NDArray[Any]]):
    """The device's row state by row slot, the fields of `runahead.runtime.kernels.row_state.RowState` as NumPy arrays.

    launched: the number that the first launch comes after.
    """

    def __init__(
        self, rings: RingMemory, max_rows: int, max_blocks: int, vocab_size: int, block_size: int, max_stop_ids: int,
        max_bias: int, *, penalty_slots: int = 0, launched: int = 0,
    ) -> None:  # fmt: skip
        slots = max_rows + 1
        self.rings = rings
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.number = launched  # the launch now running
        self.rows = _NO_ROWS  # slots of the last plan's rows, int64 [rows]
        self.samples = np.zeros(0, np.bool_)  # which of them the next S samples
        self.chunks: NDArray[np.int32] = np.zeros((0, layout.CHUNK_WORDS), np.int32)
        self.last_token = np.zeros(slots, np.int32)
        self.seq_len = np.zeros(slots, np.int32)
        self.alive = np.zeros(slots, np.bool_)
        self.block_table = np.zeros((slots, max_blocks), np.int32)
        free = np.frombuffer(ROW_RECORD.free(), np.int32)
        self.parameters = np.tile(free, (slots, 1))
        for name, column in ROW_RECORD.columns(self.parameters).items():
            setattr(self, name, column)
        self.stop_ids = np.full((slots, max_stop_ids), -1, np.int32)
        self.bias_ids = np.zeros((slots, max_bias), np.int32)
        self.bias_values = np.zeros((slots, max_bias), np.float32)
        self.allowed = np.zeros((slots, mask_words(vocab_size)), np.int32)
        # By penalty slot, as `runahead.runtime.kernels.row_state.PenaltyState`.
        self.counts = np.zeros((penalty_slots + 1, vocab_size), np.int32)
        self.in_prompt = np.zeros((penalty_slots + 1, mask_words(vocab_size)), np.int32)

    # ------------------------------------------------------------ S

    def begin(self) -> int:
        """The next launch begins. Returns its number."""
        self.number += 1
        self.rings.status[self.rings.slot(self.number), STATUS_FAULT] = 0
        return self.number

    def to_sample(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Places in the row list, and slots, of the rows that this S samples."""
        places = np.flatnonzero(self.samples)
        return places, self.rows[places]

    def advance(
        self, places: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_]
    ) -> None:
        """Advance the rows by their tokens [n], count them where there are penalties, end the rows that stop, and write
        the result cells.

        A row that had ended before stays as it is; its cell is void. Tokens become readable with the cell's store.
        """
        alive = self.alive[slots]
        position = self.seq_len[slots]
        stops = (self.stop_ids[slots] == tokens[:, None]).any(1) & (position >= self.min_position[slots])
        stopped = stops | (position >= self.max_position[slots]) | ~finite
        self.last_token[slots] = np.where(alive, tokens, self.last_token[slots])
        self.seq_len[slots] = position + (alive & finite)
        self.alive[slots] = alive & ~stopped
        counting = alive & finite & (self.penalty_slot[slots] >= 0)
        if np.count_nonzero(counting):
            self.counts[self.penalty_slot[slots[counting]], tokens[counting]] += 1
        low = tokens.astype(np.int64)
        low |= np.where(stopped, STOPPED, 0)
        low |= np.where(finite, 0, NON_FINITE)
        low = np.where(alive, low, VOID)
        self.rings.cells[self.rings.slot(self.number), places, 0] = cell_tag(self.number) | low

    # ------------------------------------------------------------ apply

    def apply(self) -> int:
        """Apply the plan in this launch's staging slot. Returns the bytes read.

        A plan of another number masks every row and leaves FAULT_PLAN_NUMBER in the result slot.
        """
        slot = self.rings.slot(self.number)
        plan = read_plan(self.rings.plan[slot])
        if plan.number != self.number:
            self.rings.status[slot, STATUS_FAULT] = FAULT_PLAN_NUMBER
            self.rows, self.samples = _NO_ROWS, np.zeros(0, np.bool_)
            self.chunks = self.chunks[:0]
            return 4 * layout.HEADER_WORDS
        bulk = self.rings.bulk[slot]
        for offset in plan.admissions.tolist():
            self._admit(bulk, offset)
        appends = plan.appends
        self.block_table[appends[:, 0], appends[:, 1]] = appends[:, 2]
        self._apply_rows(plan)
        return plan.bytes_read

    def _apply_rows(self, plan: PlanView) -> None:
        if plan.rows is not None:
            self.rows = plan.rows.astype(np.int64)
            self.samples = np.ones(self.rows.size, np.bool_)
        self.chunks = plan.chunks.copy()
        for row, start, count, _, samples in self.chunks.tolist():
            self.samples[row] = samples
            self.seq_len[self.rows[row]] = start + count

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
        self.seq_len[slot] = 0
        self.alive[slot] = True

    def _begin_penalties(self, penalty_slot: int, entries: NDArray[np.int32]) -> None:
        """Write what is known of the row that now has this slot, and remove what was known of the one before."""
        token, seen = entries[:, COUNT_TOKEN], entries[:, COUNT_SEEN]
        self.counts[penalty_slot] = 0
        self.counts[penalty_slot, token] = seen & ~PROMPT_BIT
        self.in_prompt[penalty_slot] = token_mask(token[(seen & PROMPT_BIT) != 0], self.vocab_size)

    def poison_penalty_slot(self, slot: int) -> None:
        """Fill the slot with counts as if every token had been generated often, so that a late reader is seen."""
        self.counts[slot] = 1 << 20
        self.in_prompt[slot] = -1

    def read(self) -> Mapping[str, NDArray[np.generic]]:
        """Row state and penalty state by field name: the arrays themselves, good until the next launch."""
        return {name: getattr(self, name) for name in (*ROW_TENSORS, *PENALTY_TENSORS)}

    # ------------------------------------------------------------ what F runs on

    def queries(self) -> Queries:
        """The query tokens of this launch's F."""
        return queries_of(self)

    def prompt_queries(self, queries: Queries) -> PromptQueries:
        """The query tokens of this launch that leave prompt log-probabilities."""
        return prompt_queries_of(self, queries)

    # ------------------------------------------------------------ what F leaves

    def write_finite(self, finite: NDArray[np.bool_], queries: Queries) -> None:
        """Write the flag of every row of F. finite: [T], True for a query token all of whose numbers are: its final
        hidden state, and its logits where log-probabilities of the prompt were made of them.

        A row that F masked has computed nothing, and counts as finite.
        """
        if queries.query_start_loc[-1] != queries.slots.size:
            finite = np.logical_and.reduceat(finite, queries.query_start_loc[:-1])
        flags = self.rings.finite[self.rings.slot(self.number), : queries.slots.size]
        np.logical_or(finite, queries.seq_lens == 0, out=flags, casting="unsafe")

    def write_prompt_logprobs(
        self, places: NDArray[np.int64], chosen: NDArray[np.float32], top_ids: NDArray[np.int32],
        top: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Log-probabilities of the query tokens `places` [n]. [n], [n, max_top], [n, max_top]"""
        slot = self.rings.slot(self.number)
        self.rings.prompt_logprob[slot, places] = chosen
        self.rings.prompt_top_ids[slot, places] = top_ids
        self.rings.prompt_top_logprobs[slot, places] = top
