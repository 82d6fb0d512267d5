"""F's input: a ragged batch of query tokens over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Device tensors. T query tokens in B rows: one, or one and a few drafts, of a decode row; any number of a prompt
    chunk.

    A masked or padding row has seq_len 0, and its tokens' slot_mapping points into block 0, the null block. Its state
    slot may be anything, and does not change. A row whose first query token is at position 0 begins with a state of
    zeros, whatever its slot holds.

    A launch with chunks may have rows without query tokens, and query tokens of no row after the last one: padding of a
    captured launch, masked in the same way.
    """

    token_ids: torch.Tensor  # int64 [T], clamped to the vocabulary
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T] block * block_size + offset: destination of the token's K and V
    query_start_loc: torch.Tensor  # int32 [B + 1] each row's first query token
    seq_lens: torch.Tensor  # int32 [B] tokens of each row, query tokens included; 0: masked
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    num_tokens: int  # T, known to the host
    num_rows: int  # B, known to the host
    max_seq_len: int  # an upper bound of seq_lens, known to the host
    is_decode: bool  # every row decodes
    decode_queries: int = 1  # most query tokens of a row, if all rows decode; 1 to 8
    state_slots: torch.Tensor | None = None  # int32 [B] each row's; None without recurrent layers, and for lines
    # int32 [B] the state that a row continues from: a snapshot if it begins behind a cached prefix.
    states_read_from: torch.Tensor | None = None  # None: every row reads its own slot
    # int32 [B] accepted drafts of the previous forward, which left their inputs in the slot: they are replayed before
    # the row's query tokens, since no slot has their states.
    replayed: torch.Tensor | None = None  # None: nothing is replayed
    # int32 [B] number of query tokens, from the first, whose states are written; the others are drafts, whose inputs
    # are saved.
    certain: torch.Tensor | None = None  # None: all; in GPU kernels, a drafting row's newest token
    # int32 [B] a snapshot to which a state of the row is also written; -1: none. copied_after: int32 [B] the number of
    # tokens of that state, replayed ones first, then certain ones.
    states_copied_to: torch.Tensor | None = None  # None: no snapshots
    copied_after: torch.Tensor | None = None  # None: after all of these
    # None: each row is one. Otherwise the rows are *lines* with one query token each, some consecutive in the same
    # blocks, and this has the same query tokens by row, with the states.
    in_rows: ForwardBatch | None = None

    @property
    def by_token(self) -> bool:
        return self.in_rows is not None


@dataclass(frozen=True, slots=True)
class KVCache:
    """Mixers' data of rows: paged keys and values, a pair of tensors for each attention; recurrent states, the tensors
    of each recurrent mixer; and the inputs of the newest drafts. Block 0 is the null block: padding writes it, nothing
    reads it. Snapshots follow the rows' state slots.
    """

    keys: tuple[torch.Tensor, ...]  # each [num_blocks, block_size, kv_heads, head_dim]
    values: tuple[torch.Tensor, ...]  # the same shape
    block_size: int
    states: tuple[tuple[torch.Tensor, ...], ...] = ()  # float32, each [state slots, *shape], see `Kept.state`
    runs: tuple[torch.Tensor, ...] = ()  # of each recurrent mixer, float32 [state slots of rows, K, `Kept.inputs`]
