"""F's inputs from the row state that apply has left: query tokens, the states that rows continue from, and both as
kernels take them.

States of rows and snapshots share one memory: state slots first, one for each row, then the snapshots from 1 on. A row
of the block table has its snapshots behind its blocks: one entry for each boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime import plan as layout
from runahead.runtime.kernels.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from runahead.runtime.programs.cpu.rows import HostRows

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PromptQueries:
    """The n query tokens of an F that leave the log-probability of their prompt's next token."""

    index: NDArray[np.int64]  # [n] among the query tokens of F
    entry: NDArray[np.int64]  # [n] index of the result, counted as if each decoding row had all drafts of the launch
    target: NDArray[np.int64]  # [n] the prompt's next token
    asked: NDArray[np.int32]  # [n] number of top tokens


@dataclass(frozen=True, slots=True)
class Queries:
    """F's inputs: T query tokens in B rows, as `runahead.runtime.kernels.forward_batch.ForwardBatch` but in NumPy."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B] 0: masked
    slots: NDArray[np.int64]  # [B] row slots
    # The query tokens that the next S samples from: the last one of a row, or all of a row with drafts.
    sample_queries: NDArray[np.int64]  # [S] indexes of query tokens
    sample_slots: NDArray[np.int64]  # [S] row slots
    sample_offsets: NDArray[np.int64] | int = 0  # [S] number of the query token in its row; 0: no row has drafts


def queries_of(rows: HostRows) -> Queries:
    """Return the query tokens of F: for a decode row its newest token and its drafts, for other rows their chunk."""
    slots = rows.rows
    # A held row has run this F before: its logits and its KV do not change.
    held = rows.held[slots] & rows.alive[slots]
    alive = rows.alive[slots] & ~held
    lengths = np.where(alive, rows.seq_len[slots], 0)
    drafted = np.where(held, 0, rows.drafted[slots]) if rows.most_drafts else None
    if drafted is not None and not np.count_nonzero(drafted):
        drafted = None
    if rows.chunks.size or drafted is not None:
        return _ragged_queries(rows, slots, alive, drafted, held)
    positions = np.maximum(lengths - 1, 0).astype(np.int64)
    blocks = rows.block_table[slots, positions // rows.block_size]
    mapping = np.where(alive, blocks, 0).astype(np.int64) * rows.block_size + positions % rows.block_size
    count = slots.size
    row_starts = np.arange(count + 1)
    sampled = np.flatnonzero(~held) if np.count_nonzero(held) else row_starts[:-1]
    return Queries(
        token_ids=clamped(rows, rows.last_token[slots]),
        positions=positions,
        slot_mapping=mapping,
        query_start_loc=row_starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        slots=slots,
        sample_queries=sampled,
        sample_slots=slots[sampled],
    )


def _ragged_queries(
    rows: HostRows, slots: NDArray[np.int64], alive: NDArray[np.bool_], drafted: NDArray[np.int32] | None,
    held: NDArray[np.bool_],
) -> Queries:  # fmt: skip
    """Return the query tokens of rows with drafts or chunks. drafted: [B] drafts among the query tokens; None: none.
    held: [B] rows that leave no logits."""
    counts = np.ones(slots.size, np.int64)
    ends = rows.seq_len[slots].astype(np.int64)
    if drafted is not None:
        counts += drafted
        ends += drafted
    counts[rows.chunks[:, layout.CHUNK_ROW]] = rows.chunks[:, layout.CHUNK_TOKENS]
    starts = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(slots.size), counts)
    offset = np.arange(int(starts[-1])) - starts[row]  # [T] among the query tokens of the row
    positions = np.maximum(ends[row] - counts[row] + offset, 0)
    tokens = rows.last_token[slots][row].astype(np.int32)
    if drafted is not None:
        is_draft = (offset > 0) & (drafted[row] > 0)
        tokens[is_draft] = rows.proposed[slots[row[is_draft]], offset[is_draft] - 1]
    bulk = rows.rings.bulk[rows.rings.slot(rows.number)]
    for chunk_row, _, count, first, _ in rows.chunks.tolist():
        tokens[starts[chunk_row] : starts[chunk_row] + count] = bulk[first : first + count]
    blocks = np.where(alive[row], rows.block_table[slots[row], positions // rows.block_size], 0).astype(np.int64)
    sampled = starts[np.flatnonzero(rows.samples & ~held) + 1] - 1
    if drafted is not None:
        sampled = np.union1d(sampled, np.flatnonzero(drafted[row] > 0))
    return Queries(
        token_ids=clamped(rows, tokens),
        positions=positions,
        slot_mapping=blocks * rows.block_size + positions % rows.block_size,
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.where(alive, ends, 0).astype(np.int32),
        slots=slots,
        sample_queries=sampled,
        sample_slots=slots[row[sampled]],
        sample_offsets=0 if drafted is None else offset[sampled] * (drafted[row[sampled]] > 0),
    )


def prompt_queries_of(rows: HostRows, queries: Queries) -> PromptQueries:
    """Return the query tokens that leave prompt log-probabilities."""
    bulk = rows.rings.bulk[rows.rings.slot(rows.number)]
    index, entry, target, asked = [_NO_TOKENS], [_NO_TOKENS], [_NO_TOKENS], [np.zeros(0, np.int32)]
    counts = np.diff(queries.query_start_loc)
    counts[np.isin(np.arange(counts.size), rows.chunks[:, layout.CHUNK_ROW], invert=True)] = 1 + rows.most_drafts
    begins = np.cumsum(counts) - counts  # as the host counts them, without knowing how many were drafted
    for chunk_row, _, count, offset, samples in rows.chunks.tolist():
        slot = rows.rows[chunk_row]
        wanted = rows.prompt_logprobs[slot]
        entries = count - 1 if samples else count
        if wanted < 0 or not rows.alive[slot]:
            continue
        first = int(queries.query_start_loc[chunk_row])
        index.append(np.arange(first, first + entries, dtype=np.int64))
        entry.append(np.arange(begins[chunk_row], begins[chunk_row] + entries, dtype=np.int64))
        target.append(clamped(rows, bulk[offset + 1 : offset + 1 + entries]))
        asked.append(np.full(entries, wanted, np.int32))
    return PromptQueries(np.concatenate(index), np.concatenate(entry), np.concatenate(target), np.concatenate(asked))


def clamped(rows: HostRows, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return token ids that F may look up, whatever masked rows left there."""
    return np.clip(tokens, 0, rows.vocab_size - 1).astype(np.int64)


NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StateSlots:
    """States of the B rows of an F, int32 [B] each.

    Slots are indexes of states in memory; see the same names of `runahead.runtime.kernels.forward_batch.ForwardBatch`.
    lengths: tokens that the row's state covers after this F.
    """

    slots: NDArray[np.int32]
    read_from: NDArray[np.int32]
    replayed: NDArray[np.int32]
    certain: NDArray[np.int32]
    copied_to: NDArray[np.int32]
    copied_after: NDArray[np.int32]
    lengths: NDArray[np.int32]


def slot_of_snapshot(rows: HostRows, snapshot: int) -> int:
    """Return the state slot of a snapshot, which is numbered from 1 on."""
    return rows.seq_len.size - 2 + snapshot  # behind the state slots, one fewer than row slots in memory


def state_slots_of(rows: HostRows, queries: Queries) -> StateSlots:
    """Return the states that rows continue from, and where they leave snapshots.

    A row continues from its state and replays the tokens that S has accepted since: those between its state's length
    and its first query token. Its newest token is certain; the drafts behind it are not.

    A row that begins behind a cached prefix reads its snapshot. A row that reaches a boundary with a snapshot by a
    certain token leaves its state there too.
    """
    slots, live = queries.slots, queries.seq_lens > 0
    own, had = rows.state_slot[slots], rows.state_len[slots]
    starts, counts = queries.positions[queries.query_start_loc[:-1]], np.diff(queries.query_start_loc)
    is_chunk = np.zeros(slots.size, np.bool_)
    is_chunk[rows.chunks[:, layout.CHUNK_ROW]] = True
    certain = np.where(is_chunk, counts, 1)
    begins = is_chunk & (starts == rows.block_count[slots] * rows.block_size)
    replayed = np.where(live & ~begins, starts - had, 0)
    lengths = np.where(live, starts + certain, had)
    from_snapshot = begins & (rows.begins_as[slots] > 0)
    read_from = np.where(from_snapshot, slot_of_snapshot(rows, 0) + rows.begins_as[slots], own)
    copied_to, boundary = _snapshot_boundaries(rows, slots, np.where(begins, starts, had), lengths, live)
    found = own, read_from, replayed, certain, copied_to, boundary - starts + replayed, lengths
    return StateSlots(*(column.astype(np.int32) for column in found))


def _snapshot_boundaries(
    rows: HostRows,
    slots: NDArray[np.int64],
    had: NDArray[np.int64],
    lengths: NDArray[np.int64],
    live: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where these rows leave a snapshot, or NOWHERE, and its number of tokens. had, lengths: tokens that their
    states cover before and after this F. There is at most one boundary, because drafts are fewer than the tokens
    between two."""
    every = rows.snapshot_tokens
    if not every:
        return np.full(slots.size, NOWHERE), lengths
    boundary = lengths // every * every
    reached = live & (boundary > had)
    columns = np.where(reached, rows.max_blocks - 1 + boundary // every, 0)
    taken = np.where(reached, rows.block_table[slots, columns], 0)
    return np.where(taken > 0, slot_of_snapshot(rows, 0) + taken, NOWHERE), boundary


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
