"""What a GPU keeps of drafts, at fixed addresses: tokens by position, what was proposed, the runs of the newest F."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from runahead.runtime.drafters.ngram import NO_DRAFT


@dataclass(frozen=True, slots=True)
class DraftState:
    """Of S = max_rows + 1 row slots, and of launches of up to R rows that verify K drafts each, L = R * (1 + K).

    A *run* is a row's newest token and its drafts, each of which is a query token of F: a *line*. Lines lie row by row,
    without gaps; those that no row needs come last. `run_slots` and `run_lines` are by place: place 1 + K times the
    row's, plus the number of the token in its run, with the K of the launch.

    Where rows may be held their runs stay from one F to an S some launches later. The logits of a run then lie by row
    slot: those of its newest token at the slot, and behind the S of these those of drafts, number n of a run, from 1
    on, at S + (n - 1) * kept_slots + slot. Of rows in higher slots than that nothing is drafted. A row that is held has
    one line, of length 0.

    kept_slots: row slots whose runs stay so, the lowest; 0: no row may be held.
    """

    kept_slots: int

    history: torch.Tensor  # int32 [S, context] a row's tokens by position; [S, 0] where no drafter looks them up
    proposed: torch.Tensor  # int32 [S, K] drafts of the F that held the row last
    drafted: torch.Tensor  # int32 [S] how many of them there are
    forced: torch.Tensor  # int8 [S] they are what the row's grammar forces; [0] where no row may be held
    guesses: torch.Tensor  # int32 [1] of a row and the newest launch, at most; [0] where no row may be held
    run_slots: torch.Tensor  # int32 [L] row slots; the null slot where nothing was drafted
    run_lines: torch.Tensor  # int32 [L] where the logits lie: at the query token that leaves them, or by row slot
    line_places: torch.Tensor  # int32 [L] where each line leaves its logits; [0] where no row may be held
    token_ids: torch.Tensor  # int64 [L]
    positions: torch.Tensor  # int64 [L]
    slot_mapping: torch.Tensor  # int64 [L]
    line_lens: torch.Tensor  # int32 [L] tokens that a line sees, itself included; 0: of no row
    query_start_loc: torch.Tensor  # int32 [R + 1] where each row's lines begin
    seq_lens: torch.Tensor  # int32 [R] tokens of each row, its drafts included; 0: masked
    block_tables: torch.Tensor  # int32 [R, max_blocks], or [L, max_blocks] where each line has one

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
        """A drafter looks up what followed before: one without layers."""
        return int(self.history.shape[1]) > 0

    @property
    def holds(self) -> bool:
        """Rows may be held, and have drafts that their grammars force."""
        return self.kept_slots > 0

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self) if field.name != "kept_slots"]


def make_draft_state(
    slots: int, context_length: int, max_blocks: int, rows: int, drafts: int, by_line: bool, device: torch.device,
    *, kept_slots: int = 0,
) -> DraftState:  # fmt: skip
    """Nothing known of any row. context_length: of rows whose tokens a drafter looks up; 0: none does. drafts:
    of a row, at most. by_line: each line has a block table of its own. kept_slots: see `DraftState`."""
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
        run_slots=i32(lines, value=slots - 1),
        run_lines=i32(lines),
        line_places=i32(lines if holds else 0, value=slots - 1),
        token_ids=i64(lines),
        positions=i64(lines),
        slot_mapping=i64(lines),
        line_lens=i32(lines),
        query_start_loc=i32(rows + 1),
        seq_lens=i32(rows),
        block_tables=i32(lines if by_line else rows, max_blocks),
    )


def forget_drafts(drafts: DraftState) -> None:
    """As it was made."""
    for tensor in drafts.tensors:
        tensor.zero_()
    drafts.proposed.fill_(NO_DRAFT)
    drafts.run_slots.fill_(drafts.drafted.shape[0] - 1)
    drafts.line_places.fill_(drafts.drafted.shape[0] - 1)
