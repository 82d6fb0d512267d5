"""The device's row state: everything a launch knows of a row, by `row_slot`. S, apply and F are all that write it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from runtime.request import MAX_BIAS, MAX_STOP_IDS

if TYPE_CHECKING:  # NumPy's programs need the names of the fields alone
    import torch


@dataclass(frozen=True, slots=True)
class RowState:
    """Tensors whose first dimension is `slots` = max_rows + 1. The last slot is the null row that padding names."""

    last_token: torch.Tensor  # int32 [slots] the newest token: the input of the row's next decode step
    seq_len: torch.Tensor  # int32 [slots] tokens known: prompt so far prefilled, and sampled; the next token's position
    alive: torch.Tensor  # bool [slots] cleared by S when the row ends
    block_table: torch.Tensor  # int32 [slots, max_blocks] block 0 is the null block
    temperature: torch.Tensor  # float32 [slots] 0: greedy
    top_k: torch.Tensor  # int32 [slots] 0: off
    top_p: torch.Tensor  # float32 [slots] 1: off
    min_p: torch.Tensor  # float32 [slots] 0: off
    seed: torch.Tensor  # int64 [slots] the 64 bits of the request's seed
    logprobs: torch.Tensor  # int32 [slots] -1: none; n >= 0: the chosen token's and the top n
    min_position: torch.Tensor  # int32 [slots] below it the stop ids are masked
    max_position: torch.Tensor  # int32 [slots] the row ends with the token at this position
    stop_ids: torch.Tensor  # int32 [slots, MAX_STOP_IDS] padded with -1
    bias_count: torch.Tensor  # int32 [slots] 0: no bias
    bias_ids: torch.Tensor  # int32 [slots, MAX_BIAS]
    bias_values: torch.Tensor  # float32 [slots, MAX_BIAS]
    has_allowed: torch.Tensor  # bool [slots] False: every token is allowed
    allowed: torch.Tensor  # int32 [slots, ceil(vocab / 32)] bit v % 32 of word v // 32 allows token v
    prompt_logprobs: torch.Tensor  # int32 [slots] as logprobs, for the tokens of the prompt
    repetition_penalty: torch.Tensor  # float32 [slots] 1: off
    presence_penalty: torch.Tensor  # float32 [slots] 0: off
    frequency_penalty: torch.Tensor  # float32 [slots] 0: off
    penalty_slot: torch.Tensor  # int32 [slots] where the row's tokens are counted; -1: it has no penalties

    @property
    def slots(self) -> int:
        return int(self.seq_len.shape[0])


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """What rows with penalties have said so far, by `penalty_slot`. The last slot is nobody's.

    S counts the token that it keeps; an admission clears its slot and writes what is known of the row.
    """

    counts: torch.Tensor  # int32 [penalty_slots + 1, vocab] occurrences in the completion
    in_prompt: torch.Tensor  # int32 [penalty_slots + 1, ceil(vocab / 32)] bits as in `RowState.allowed`


def make_penalty_state(penalty_slots: int, vocab_size: int, device: torch.device) -> PenaltyState:
    """Nothing said in any slot."""
    import torch

    return PenaltyState(
        counts=torch.zeros((penalty_slots + 1, vocab_size), dtype=torch.int32, device=device),
        in_prompt=torch.zeros((penalty_slots + 1, (vocab_size + 31) // 32), dtype=torch.int32, device=device),
    )


def make_row_state(max_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> RowState:
    """A zeroed row state; every row dead, `stop_ids` all -1."""
    import torch

    slots = max_rows + 1

    def i32(*shape: int) -> torch.Tensor:
        return torch.zeros((slots, *shape), dtype=torch.int32, device=device)

    def f32(*shape: int) -> torch.Tensor:
        return torch.zeros((slots, *shape), dtype=torch.float32, device=device)

    def flag() -> torch.Tensor:
        return torch.zeros((slots,), dtype=torch.bool, device=device)

    return RowState(
        last_token=i32(),
        seq_len=i32(),
        alive=flag(),
        block_table=i32(max_blocks),
        temperature=f32(),
        top_k=i32(),
        top_p=f32() + 1.0,
        min_p=f32(),
        seed=torch.zeros((slots,), dtype=torch.int64, device=device),
        logprobs=i32() - 1,
        min_position=i32(),
        max_position=i32(),
        stop_ids=i32(MAX_STOP_IDS) - 1,
        bias_count=i32(),
        bias_ids=i32(MAX_BIAS),
        bias_values=f32(MAX_BIAS),
        has_allowed=flag(),
        allowed=i32((vocab_size + 31) // 32),
        prompt_logprobs=i32() - 1,
        repetition_penalty=f32() + 1.0,
        presence_penalty=f32(),
        frequency_penalty=f32(),
        penalty_slot=i32() - 1,
    )


def row_fields() -> tuple[str, ...]:
    """Names of the fields of `RowState`."""
    return tuple(f.name for f in fields(RowState))


def penalty_fields() -> tuple[str, ...]:
    """Names of the fields of `PenaltyState`."""
    return tuple(f.name for f in fields(PenaltyState))
