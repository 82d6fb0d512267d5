"""Draft state on a GPU at fixed addresses: token history, proposed drafts, and the newest F's query tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runahead.runtime.drafters.ngram import NO_DRAFT


class DraftState(NamedTuple):
    """Drafts of S = max_rows + 1 row slots, for launches of up to R rows that verify K drafts each; L = R * (1 + K).

    A row's query tokens of F are its newest token and its drafts. They lie row by row, without gaps; unused ones come
    last. `verify_slots` and `verify_logits` are indexed by (1 + K) * the row's index + the token's number in the row,
    with the launch's K.

    Where rows may be held, logits must survive from one F to an S some launches later. They are then indexed by row
    slot: a newest token's logits at the slot, and logits of draft n, from 1 on, at S + (n - 1) * kept_slots + slot.
    Rows in higher slots have no drafts. A held row has one query token, of length 0.

    kept_slots: number of the lowest row slots whose drafts are kept so; 0: no row may be held.
    """

    kept_slots: int

    history: torch.Tensor  # int32 [S, context] a row's tokens by position; [S, 0] without a drafter that reads them
    proposed: torch.Tensor  # int32 [S, K] drafts of the row's last F
    drafted: torch.Tensor  # int32 [S] number of these drafts
    forced: torch.Tensor  # int8 [S] whether the row's grammar forces them; [0] where no row may be held
    guesses: torch.Tensor  # int32 [1] most guesses of a row in the newest launch; [0] where no row may be held
    verify_slots: torch.Tensor  # int32 [L] row slots; the null slot where nothing was drafted
    verify_logits: torch.Tensor  # int32 [L] index of the logits: the query token, or by row slot
    logits_slots: torch.Tensor  # int32 [L] where each query token leaves its logits; [0] where no row may be held
    token_ids: torch.Tensor  # int64 [L]
    positions: torch.Tensor  # int64 [L]
    slot_mapping: torch.Tensor  # int64 [L]
    token_lens: torch.Tensor  # int32 [L] tokens that a query token attends to, itself included; 0: unused
    query_start_loc: torch.Tensor  # int32 [R + 1] each row's first query token
    seq_lens: torch.Tensor  # int32 [R] tokens of each row, its drafts included; 0: masked
    block_tables: torch.Tensor  # int32 [L, max_blocks], of each query token

    @property
    def rows(self) -> int:
        """Most rows of a launch that verifies drafts."""
        return int(self.seq_lens.shape[0])

    @property
    def most(self) -> int:
        """Most drafts of a row."""
        return int(self.proposed.shape[1])

    @property
    def has_drafter(self) -> bool:
        """Return whether a drafter without layers reads the token history."""
        return int(self.history.shape[1]) > 0

    @property
    def holds(self) -> bool:
        """Return whether rows may be held, with drafts forced by their grammars."""
        return self.kept_slots > 0

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one for one in self if isinstance(one, torch.Tensor)]


def make_draft_state(
    slots: int, context_length: int, max_blocks: int, rows: int, drafts: int, device: torch.device,
    *, kept_slots: int = 0,
) -> DraftState:  # fmt: skip
    """Make an empty draft state. context_length: length of the token history; 0: no drafter reads it. drafts: most of a
    row. kept_slots: see `DraftState`.
    """
    lines, holds = rows * (1 + drafts), kept_slots > 0

    def i32(*shape: int, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    def i64(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return DraftState(
        kept_slots=kept_slots,
        history=i32(slots, context_length),
        proposed=i32(slots, drafts, value=NO_DRAFT),
        drafted=i32(slots),
        forced=torch.zeros(slots if holds else 0, dtype=torch.int8, device=device),
        guesses=i32(1 if holds else 0),
        verify_slots=i32(lines, value=slots - 1),
        verify_logits=i32(lines),
        logits_slots=i32(lines if holds else 0, value=slots - 1),
        token_ids=i64(lines),
        positions=i64(lines),
        slot_mapping=i64(lines),
        token_lens=i32(lines),
        query_start_loc=i32(rows + 1),
        seq_lens=i32(rows),
        block_tables=i32(lines, max_blocks),
    )


def forget_drafts(drafts: DraftState) -> None:
    """Reset to the initial state."""
    for tensor in drafts.tensors:
        tensor.zero_()
    drafts.proposed.fill_(NO_DRAFT)
    drafts.verify_slots.fill_(drafts.drafted.shape[0] - 1)
    drafts.logits_slots.fill_(drafts.drafted.shape[0] - 1)
