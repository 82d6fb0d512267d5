"""What F is given: one ragged batch of query tokens over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors on the device. T query tokens in B rows; a decode row has one, or a few drafts more; a prompt chunk any
    number.

    A masked or padding row has seq_len 0, and its tokens' slot_mapping points into block 0, the null block. Its state
    slot may be anything, and is left as it is. A row whose first query token is at position 0 begins here, with a state
    of zeros, whatever its slot holds.

    In a launch with chunks there may be rows without query tokens, and behind the last row's more query tokens that no
    row has: padding of a captured launch, which is masked in the same way.
    """

    token_ids: torch.Tensor  # int64 [T], clamped to the vocabulary
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T] block * block_size + offset: where the token's K and V are written
    query_start_loc: torch.Tensor  # int32 [B + 1] where each row's query tokens begin
    seq_lens: torch.Tensor  # int32 [B] tokens each row attends to, the query tokens included; 0: masked
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    num_tokens: int  # T, known to the host
    num_rows: int  # B, known to the host
    max_seq_len: int  # an upper bound of seq_lens, known to the host
    is_decode: bool  # every row decodes
    decode_queries: int = 1  # query tokens of a row, at most, if all rows decode; 1 to 8
    state_slots: torch.Tensor | None = None  # int32 [B] each row's; None where no layer keeps a state, and of lines
    # int32 [B] where the state is read that a row goes on with: a snapshot, where it begins behind a cached prefix.
    states_read_from: torch.Tensor | None = None  # None: every row reads its own slot
    # int32 [B] how many drafts of the forward before S has kept: their inputs, which that forward has left in the slot,
    # come before those of the row's query tokens. No slot has their states.
    replayed: torch.Tensor | None = None  # None: nobody's are
    # int32 [B] query tokens, the first ones, whose states are written: the others are drafts, whose inputs are left.
    certain: torch.Tensor | None = None  # None: all are; for kernels of a GPU, the newest token of a row with drafts
    # int32 [B] where a state of the row is written beside its own slot: a snapshot; -1: nowhere. copied_after: int32
    # [B] behind how many tokens, the replayed ones and then the certain ones.
    states_copied_to: torch.Tensor | None = None  # None: nobody's is
    copied_after: torch.Tensor | None = None  # None: behind all of these
    # None: every row is one. Else the rows are *lines*, with one query token each, some of which follow each other in
    # the same blocks; and these are the same query tokens in their rows, which alone name states.
    in_rows: ForwardBatch | None = None

    @property
    def by_token(self) -> bool:
        return self.in_rows is not None


@dataclass(frozen=True, slots=True)
class KVCache:
    """What mixers keep of rows: paged keys and values, a pair of tensors for each attention; recurrent states, the
    tensors of each recurrent mixer, and the inputs of the row's newest drafts. Block 0 is the null block: padding
    writes it, none reads it. Snapshots are state slots behind those of rows."""

    keys: tuple[torch.Tensor, ...]  # each [num_blocks, block_size, kv_heads, head_dim]
    values: tuple[torch.Tensor, ...]  # the same shape
    block_size: int
    states: tuple[tuple[torch.Tensor, ...], ...] = ()  # float32, each [state slots, *shape], as `Kept.state` has them
    runs: tuple[torch.Tensor, ...] = ()  # of each recurrent mixer, float32 [state slots of rows, K, `Kept.inputs`]
