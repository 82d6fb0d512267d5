"""The device's row state: a launch's data of rows by `row_slot`, written only by S, apply and F."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from runahead.runtime.row_record import ROW_RECORD, RowParameters, mask_words
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS

if TYPE_CHECKING:  # NumPy's programs need only the names of the fields
    import torch


class RowColumns(NamedTuple):
    """The tensors of a `RowState`, as kernels take them."""

    last_token: torch.Tensor
    seq_len: torch.Tensor
    alive: torch.Tensor  # int8
    block_table: torch.Tensor
    parameters: torch.Tensor
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    allowed: torch.Tensor


@dataclass(frozen=True)
class RowState(RowParameters["torch.Tensor"]):
    """Tensors whose first dimension is `slots` = max_rows + 1. The last slot is the null row for padding.

    The fields of `RowParameters` are views of `parameters`: their elements are ADMIT_WORDS words apart.
    """

    last_token: torch.Tensor  # int32 [slots] the newest token: the input of the next decode step
    seq_len: torch.Tensor  # int32 [slots] known tokens: prefilled prompt and sampled tokens; the next token's position
    alive: torch.Tensor  # bool [slots] cleared by S when the row ends
    block_table: torch.Tensor  # int32 [slots, max_blocks] block 0 is the null block
    parameters: torch.Tensor  # int32 [slots, ADMIT_WORDS] the head of the row's admission record
    stop_ids: torch.Tensor  # int32 [slots, MAX_STOP_IDS] padded with -1
    bias_ids: torch.Tensor  # int32 [slots, MAX_BIAS] the first `bias_count`
    bias_values: torch.Tensor  # float32 [slots, MAX_BIAS]
    allowed: torch.Tensor  # int32 [slots, ceil(vocab / 32)] bit v % 32 of word v // 32 allows token v

    def __post_init__(self) -> None:
        import torch

        types = {"i": torch.int32, "f": torch.float32, "q": torch.int64}
        for name, column in ROW_RECORD.columns(self.parameters, types).items():
            object.__setattr__(self, name, column)

    @cached_property
    def columns(self) -> RowColumns:
        """The tensors as kernels take them."""
        import torch

        return RowColumns(
            self.last_token, self.seq_len, self.alive.view(torch.int8), self.block_table, self.parameters,
            self.stop_ids, self.bias_ids, self.bias_values, self.allowed,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        return int(self.seq_len.shape[0])


class PenaltyState(NamedTuple):
    """Token counts of rows with penalties, by `penalty_slot`. The last slot is unused.

    S counts each token that it keeps; an admission clears the row's slot and writes the known counts.
    """

    counts: torch.Tensor  # int32 [penalty_slots + 1, vocab] occurrences in the completion
    in_prompt: torch.Tensor  # int32 [penalty_slots + 1, ceil(vocab / 32)] bits as in `RowState.allowed`


def make_penalty_state(penalty_slots: int, vocab_size: int, device: torch.device) -> PenaltyState:
    """Make empty counts."""
    import torch

    return PenaltyState(
        counts=torch.zeros((penalty_slots + 1, vocab_size), dtype=torch.int32, device=device),
        in_prompt=torch.zeros((penalty_slots + 1, mask_words(vocab_size)), dtype=torch.int32, device=device),
    )


def make_row_state(max_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> RowState:
    """Make a zeroed row state: no row is alive, all parameters have the values of an empty slot, `stop_ids` are -1."""
    import torch

    slots = max_rows + 1

    def i32(*shape: int) -> torch.Tensor:
        return torch.zeros((slots, *shape), dtype=torch.int32, device=device)

    free = torch.frombuffer(bytearray(ROW_RECORD.free()), dtype=torch.int32)
    return RowState(
        last_token=i32(),
        seq_len=i32(),
        alive=torch.zeros((slots,), dtype=torch.bool, device=device),
        block_table=i32(max_blocks),
        parameters=free.repeat(slots, 1).to(device),
        stop_ids=i32(MAX_STOP_IDS) - 1,
        bias_ids=i32(MAX_BIAS),
        bias_values=torch.zeros((slots, MAX_BIAS), dtype=torch.float32, device=device),
        allowed=i32(mask_words(vocab_size)),
    )
