"""Batches for recurrent mixers alone: rows with their query tokens, positions and state slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Row:
    """first: position of its first query token. alive: not masked. begins_as: the slot that it goes on from, if that is
    not its own. left_in: a slot in which its state is left, too; -1: in none. left_after: behind so many tokens, those
    that are replayed and then those that are certain; None: behind all of these. replayed: of the drafts of its run
    before, those that were kept. drafts: query tokens that may not be."""

    state_slot: int
    first: int
    count: int
    alive: bool = True
    begins_as: int | None = None
    left_in: int = -1
    left_after: int | None = None
    replayed: int = 0
    drafts: int = 0


def batch_of(rows: Sequence[Row]) -> ForwardBatch:
    counts = [row.count for row in rows]
    tokens = sum(counts)
    reads = [row.state_slot if row.begins_as is None else row.begins_as for row in rows]
    copies = [row.left_in for row in rows]
    certain = [row.count - row.drafts for row in rows]
    ends = [row.replayed + row.count - row.drafts for row in rows]
    copied_after = [end if row.left_after is None else row.left_after for row, end in zip(rows, ends, strict=True)]
    decodes = max(certain) == 1
    snapshots = any(row.begins_as is not None or row.left_in >= 0 for row in rows)
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.cat([torch.arange(row.first, row.first + row.count) for row in rows]),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        seq_lens=torch.tensor([(row.first + row.count) * row.alive for row in rows], dtype=torch.int32),
        block_tables=torch.zeros((len(rows), 1), dtype=torch.int32),
        num_tokens=tokens,
        num_rows=len(rows),
        max_seq_len=max(row.first + row.count for row in rows),
        is_decode=decodes,
        decode_queries=max(counts) if decodes else 1,
        state_slots=torch.tensor([row.state_slot for row in rows], dtype=torch.int32),
        states_read_from=torch.tensor(reads, dtype=torch.int32) if snapshots else None,
        states_copied_to=torch.tensor(copies, dtype=torch.int32) if snapshots else None,
        replayed=torch.tensor([row.replayed for row in rows], dtype=torch.int32),
        certain=torch.tensor(certain, dtype=torch.int32),
        copied_after=torch.tensor(copied_after, dtype=torch.int32) if snapshots else None,
    )
