"""What F runs on, from the row state that apply has left: query tokens, and the states that rows go on with.

States of rows and snapshots lie in the same memory: state slots first, one for each row, then the snapshots, 1 and so
on. Behind its blocks a row's line of the block table has its snapshots: a place for each border.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runahead.runtime import plan as layout

if TYPE_CHECKING:
    from runahead.runtime.programs.cpu.rows import HostRows

_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PromptQueries:
    """The n query tokens of an F that leave the log-probability of their prompt's next token."""

    index: NDArray[np.int64]  # [n] among the query tokens of F
    entry: NDArray[np.int64]  # [n] where it leaves it: as if each row that decodes had all drafts of the launch
    target: NDArray[np.int64]  # [n] the prompt's next token
    asked: NDArray[np.int32]  # [n] how many of the most likely ones


@dataclass(frozen=True, slots=True)
class Queries:
    """What F runs on: T query tokens in B rows, as `runahead.runtime.kernels.forward_batch.ForwardBatch` but in
    NumPy."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [B + 1]
    seq_lens: NDArray[np.int32]  # [B] 0: masked
    slots: NDArray[np.int64]  # [B] row slots
    # What the next S samples from: the last query token of a row, or of a row with drafts each of its query tokens.
    sample_queries: NDArray[np.int64]  # [S] their index
    sample_slots: NDArray[np.int64]  # [S] row slots
    sample_offsets: NDArray[np.int64] | int = 0  # [S] how many of the row come before them; 0: nobody has drafts


def queries_of(rows: HostRows) -> Queries:
    """One query token for a decode row, and its drafts; a prompt chunk's own for the others."""
    slots = rows.rows
    # A row that is held has been through this F before: its logits and its KV stay as they are.
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
    places = np.arange(count + 1)
    sampled = np.flatnonzero(~held) if np.count_nonzero(held) else places[:-1]
    return Queries(
        token_ids=clamped(rows, rows.last_token[slots]),
        positions=positions,
        slot_mapping=mapping,
        query_start_loc=places.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        slots=slots,
        sample_queries=sampled,
        sample_slots=slots[sampled],
    )


def _ragged_queries(
    rows: HostRows, slots: NDArray[np.int64], alive: NDArray[np.bool_], drafted: NDArray[np.int32] | None,
    held: NDArray[np.bool_],
) -> Queries:  # fmt: skip
    """drafted: [B] query tokens that are drafts; None: nobody has any. held: [B] rows that leave nothing."""
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
    for place, _, count, first, _ in rows.chunks.tolist():
        tokens[starts[place] : starts[place] + count] = bulk[first : first + count]
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
    """The query tokens that leave prompt log-probabilities."""
    bulk = rows.rings.bulk[rows.rings.slot(rows.number)]
    index, entry, target, asked = [_NO_TOKENS], [_NO_TOKENS], [_NO_TOKENS], [np.zeros(0, np.int32)]
    counts = np.diff(queries.query_start_loc)
    counts[np.isin(np.arange(counts.size), rows.chunks[:, layout.CHUNK_ROW], invert=True)] = 1 + rows.most_drafts
    begins = np.cumsum(counts) - counts  # as the host counts them, which does not know how many were drafted
    for place, _, count, offset, samples in rows.chunks.tolist():
        slot = rows.rows[place]
        wanted = rows.prompt_logprobs[slot]
        entries = count - 1 if samples else count
        if wanted < 0 or not rows.alive[slot]:
            continue
        first = int(queries.query_start_loc[place])
        index.append(np.arange(first, first + entries, dtype=np.int64))
        entry.append(np.arange(begins[place], begins[place] + entries, dtype=np.int64))
        target.append(clamped(rows, bulk[offset + 1 : offset + 1 + entries]))
        asked.append(np.full(entries, wanted, np.int32))
    return PromptQueries(np.concatenate(index), np.concatenate(entry), np.concatenate(target), np.concatenate(asked))


def clamped(rows: HostRows, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Token ids as F may look them up, whatever a row that is masked left there."""
    return np.clip(tokens, 0, rows.vocab_size - 1).astype(np.int64)


NOWHERE = -1


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Of the B rows of an F, int32 each [B]. Slots are places among the states in memory; see the same names of
    `runahead.runtime.kernels.forward_batch.ForwardBatch`. lengths: tokens that the row's state stands for behind it."""

    slots: NDArray[np.int32]
    read_from: NDArray[np.int32]
    replayed: NDArray[np.int32]
    certain: NDArray[np.int32]
    copied_to: NDArray[np.int32]
    copied_after: NDArray[np.int32]
    lengths: NDArray[np.int32]


def place_of_snapshot(rows: HostRows, snapshot: int) -> int:
    """Of a snapshot, which is numbered from 1 on."""
    return rows.seq_len.size - 2 + snapshot  # behind the state slots, one fewer than there are lines of row state


def state_places_of(rows: HostRows, queries: Queries) -> StatePlaces:
    """A row goes on from the state that it has, by the tokens of its run before that S has kept: those between the
    length of its state and its first query token. Its newest token is certain; drafts behind it are not.

    A row that begins behind a cached prefix reads the snapshot behind it. A row that comes to a border with a snapshot,
    by a token that is certain, leaves its state there too.
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
    read_from = np.where(from_snapshot, place_of_snapshot(rows, 0) + rows.begins_as[slots], own)
    copied_to, border = _borders(rows, slots, np.where(begins, starts, had), lengths, live)
    found = own, read_from, replayed, certain, copied_to, border - starts + replayed, lengths
    return StatePlaces(*(column.astype(np.int32) for column in found))


def _borders(
    rows: HostRows,
    slots: NDArray[np.int64],
    had: NDArray[np.int64],
    lengths: NDArray[np.int64],
    live: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where these rows leave a snapshot, or NOWHERE, and of how many tokens. had, lengths: tokens that their states
    stand for before and behind this F. There is one border at most: a run is no longer than what lies between two."""
    every = rows.snapshot_tokens
    if not every:
        return np.full(slots.size, NOWHERE), lengths
    border = lengths // every * every
    reached = live & (border > had)
    columns = np.where(reached, rows.max_blocks - 1 + border // every, 0)
    taken = np.where(reached, rows.block_table[slots, columns], 0)
    return np.where(taken > 0, place_of_snapshot(rows, 0) + taken, NOWHERE), border
