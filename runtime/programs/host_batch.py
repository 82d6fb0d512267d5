"""What F runs on, as kernels take it: the query tokens of a launch's rows, and which states the rows go on with."""

from __future__ import annotations

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.programs.host_queries import Queries
from runahead.runtime.programs.host_rows import HostRows
from runahead.runtime.programs.host_states import state_places_of


def batch_of(rows: HostRows, queries: Queries) -> ForwardBatch:
    """queries: those of this launch. The tensors share memory with both."""
    count, tokens = queries.slots.size, queries.token_ids.size
    states = state_places_of(rows, queries)
    return ForwardBatch(
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
        state_slots=torch.from_numpy(states.slots),
        states_read_from=torch.from_numpy(states.read_from),
        states_copied_to=torch.from_numpy(states.copied_to),
    )
