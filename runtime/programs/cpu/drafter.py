"""A draft head over a program's rows. Its KV entries are beside the model's, and its proposals come from them.

F leaves the hidden state of each query token, and the head's entries, in the row's block, under the same rules as the
model's keys and values. A proposal begins with the newest token, which no F has had yet, and continues with hidden
states that the head predicts. Entries made from predictions are overwritten by the next F, which has the same tokens or
others in their positions, before anything else reads them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.drafters.ngram import NO_DRAFT, Drafter
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.models.decoder import ReadHidden
from runahead.runtime.models.drafters.draft_model import DraftNetwork
from runahead.runtime.programs.cpu.inputs import Queries, clamped
from runahead.runtime.programs.cpu.rows import HostRows

# Chooses tokens of these rows, some positions beyond their length, from logits: float32 [n, vocab], int64 [n].
Choose = Callable[[torch.Tensor, NDArray[np.int64], int], NDArray[np.int32]]


class HeadDrafter(Drafter):
    """A drafter whose entries and hidden states are in blocks. It keeps nothing by row slot.

    rows: their tokens, lengths and blocks are read. num_blocks: of the pool, including the null block.
    """

    def __init__(self, head: DraftNetwork, rows: HostRows, num_blocks: int, choose: Choose) -> None:
        self._head = head
        self._rows = rows
        self._choose = choose
        self._cache = head.make_cache(num_blocks, rows.block_size)

    def hidden_reader(self, seen: dict[int, torch.Tensor]) -> ReadHidden | None:
        """See `DraftHead.looking`."""
        return self._head.hidden_reader(seen)

    def follow(
        self, queries: Queries, batch: ForwardBatch, hidden: torch.Tensor, seen: dict[int, torch.Tensor]
    ) -> None:
        """Store F's hidden states, float32 [T, hidden], and write the head's entries of its query tokens."""
        self._cache.hidden[queries.slot_mapping] = self._head.read(hidden, seen)
        row = np.repeat(np.arange(queries.slots.size), np.diff(queries.query_start_loc))
        there = (queries.seq_lens[row] > 0) & (queries.positions > 0)
        before = self._before(queries.slots[row], queries.positions, there)
        self._head.fill(batch, before, self._cache)

    def propose(self, slots: NDArray[np.int64], lengths: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        proposed = np.full((slots.size, count), NO_DRAFT, np.int32)
        left = np.minimum(count, self._rows.max_position[slots] - lengths)  # no block is reserved beyond the row's end
        left[self._rows.mask_epoch[slots] != 0] = 0  # the mask worker can't predict this drafter's drafts
        going = np.flatnonzero(left > 0)
        tokens = self._rows.last_token[slots[going]]
        hidden = self._before(slots[going], lengths[going] - 1, np.ones(going.size, np.bool_))
        for ahead in range(count):
            if not going.size:
                break
            batch = self._batch(slots[going], tokens, lengths[going] - 1 + ahead)
            expected, logits = self._head.step(batch, hidden, self._cache)
            chosen = self._choose(logits, slots[going], ahead)
            proposed[going, ahead] = chosen
            goes_on = left[going] > ahead + 1
            going, tokens, hidden = going[goes_on], chosen[goes_on], expected[goes_on]
        return proposed

    def _before(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], there: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Return hidden states of the positions before these, float32 [n, width]; zeros where there are none."""
        size = self._rows.block_size
        block, offset = np.divmod(np.maximum(positions - 1, 0), size)
        kv_slot = np.where(there, self._rows.block_table[slots, block], 0).astype(np.int64) * size + offset
        found = self._cache.hidden[kv_slot]
        found[~there] = 0
        return found

    def _batch(self, slots: NDArray[np.int64], tokens: NDArray[np.int32], positions: NDArray[np.int64]) -> ForwardBatch:
        """Return a batch of one query token for each of these rows. [n], [n], [n]"""
        tables, size = self._rows.block_table[slots, : self._rows.max_blocks], self._rows.block_size
        block, offset = np.divmod(positions, size)
        count = slots.size
        mapping = tables[np.arange(count), block].astype(np.int64) * size + offset
        return ForwardBatch(
            token_ids=torch.from_numpy(clamped(self._rows, tokens)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(mapping),
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy((positions + 1).astype(np.int32)),
            block_tables=torch.from_numpy(tables),
            num_tokens=count,
            num_rows=count,
            max_seq_len=int(positions.max()) + 1,
            is_decode=True,
        )

    # ------------------------------------------------------------ the test mode

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Write NaN into released blocks."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for tensor in (*self._cache.entries.keys, *self._cache.entries.values):
            tensor[index] = float("nan")
        kept, size = self._cache.hidden, self._rows.block_size
        by_block = kept.reshape(len(kept) // size, size, kept.shape[1])
        by_block[index.numpy()] = np.nan
