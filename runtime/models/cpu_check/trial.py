"""Runs a decoder directly, without engine or scheduler: sequences of known tokens, any chunks, any neighbours.

For the self-test of row invariance and for tests. Everything a result may not depend on is hostile: the cache starts as
NaN, the null block too, blocks are handed out in random order, and masked rows lie between live ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.rounding import ceil_div

MASKED = -1  # as a sequence's number in `Trial.advance`


class Trial:
    """Sequences by number, each with a block table of its own. Tokens are given beforehand or appended."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]], capacity: int, block_size: int, seed: int):
        """capacity: tokens that each sequence may grow to."""
        self.tokens = [list(sequence) for sequence in sequences]
        self.computed = [0] * len(sequences)
        self._decoder = decoder
        self._blocks_each = ceil_div(capacity, block_size)
        num_blocks = len(sequences) * self._blocks_each * 2 + 1
        draw = torch.Generator().manual_seed(seed)
        self._cache = decoder.make_cache(num_blocks, block_size, state_slots=len(sequences) + 1)
        states = [tensor for each in self._cache.states for tensor in each]
        for tensor in (*self._cache.keys, *self._cache.values, *states):
            tensor.fill_(float("nan"))
        order = torch.randperm(num_blocks - 1, generator=draw) + 1
        owned = order[: len(sequences) * self._blocks_each].view(-1, self._blocks_each)
        self._spare = int(order[-1])  # owned by nobody: what block tables name beyond a row's length
        self._tables = owned.to(torch.int32)
        self._state_slots = torch.randperm(len(sequences), generator=draw).tolist()

    def advance(self, work: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """One forward. work: (sequence, number of its next tokens), or (MASKED, number) for a masked row.

        Returns the logits of every query token by item of work, float32 [number, vocab]; those of masked rows too.
        """
        batch = self._batch(work)
        logits = self._decoder.logits(self._decoder.forward(batch, self._cache))
        for sequence, count in work:
            if sequence != MASKED:
                self.computed[sequence] += count
        return list(logits.split([count for _, count in work]))

    def _batch(self, work: Sequence[tuple[int, int]]) -> ForwardBatch:
        block_size = self._cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        state_slots: list[int] = []
        tables = torch.full((len(work), self._blocks_each + 1), self._spare, dtype=torch.int32)
        for row, (sequence, count) in enumerate(work):
            if sequence == MASKED:
                token_ids += [0] * count
                positions += [0] * count
                slots += [0] * count
                seq_lens.append(0)
                state_slots.append(row % (len(self.tokens) + 1))  # somebody's: it is to stay as it is
                continue
            state_slots.append(self._state_slots[sequence])
            start = self.computed[sequence]
            used = ceil_div(start + count, block_size)
            table = self._tables[sequence].tolist()
            tables[row, :used] = self._tables[sequence, :used]
            token_ids += self.tokens[sequence][start : start + count]
            positions += range(start, start + count)
            slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
            seq_lens.append(start + count)
        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        assert len(token_ids) == starts[-1], "work asks for tokens that a sequence does not have"
        device = self._decoder.device
        return ForwardBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            num_tokens=len(token_ids),
            num_rows=len(work),
            max_seq_len=max(seq_lens),
            is_decode=all(count == 1 for _, count in work),
            state_slots=torch.tensor(state_slots, dtype=torch.int32, device=device),
        )
