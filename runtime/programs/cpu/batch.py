"""F's inputs as kernels take them: the query tokens of a launch's rows, and the states that the rows continue from."""

from __future__ import annotations

from dataclasses import replace

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.programs.cpu.inputs import Queries, StateSlots
from runahead.runtime.programs.cpu.rows import HostRows


def batch_of(rows: HostRows, queries: Queries, states: StateSlots | None) -> ForwardBatch:
    """Return the batch of this launch's query tokens. states: the rows' states, if the model has any. The tensors share
    memory with all three arguments."""
    count, tokens = queries.slots.size, queries.token_ids.size
    batch = ForwardBatch(
        token_ids=torch.from_numpy(queries.token_ids),
        positions=torch.from_numpy(queries.positions),
        slot_mapping=torch.from_numpy(queries.slot_mapping),
        query_start_loc=torch.from_numpy(queries.query_start_loc),
        seq_lens=torch.from_numpy(queries.seq_lens),
        block_tables=torch.from_numpy(rows.block_table[queries.slots, : rows.max_blocks]),
        num_tokens=tokens,
        num_rows=count,
        max_seq_len=int(queries.seq_lens.max()),
        is_decode=tokens == count and not rows.chunks.size,
    )
    if states is None:
        return batch
    return replace(
        batch,
        state_slots=torch.from_numpy(states.slots),
        states_read_from=torch.from_numpy(states.read_from),
        replayed=torch.from_numpy(states.replayed),
        certain=torch.from_numpy(states.certain),
        states_copied_to=torch.from_numpy(states.copied_to),
        copied_after=torch.from_numpy(states.copied_after),
    )
