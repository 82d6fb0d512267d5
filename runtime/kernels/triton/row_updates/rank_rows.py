"""Row state that the first rank decides and every rank copies: S's results and drafts.
`runahead.runtime.programs.cpu.sampler` does the same on the CPU.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.ranks import Ranks
from runahead.runtime.kernels.row_state import RowState

_ROWS: Final = 128  # of a program
_SLOT, _TOKEN, _LENGTH, _VERDICT = (tl.constexpr(word) for word in range(4))
_WORDS: Final = 4
_ALIVE, _HELD = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["num_rows"])
def _words_kernel(state, slots, held, words, num_rows, ROWS: tl.constexpr, PACKS: tl.constexpr):
    """Copy ROWS rows into `words`, with PACKS, or from there into the row state."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    at = words + row * 4
    if PACKS:
        slot = tl.load(slots + row, mask=there, other=0)
        verdict = tl.where(tl.load(state.alive + slot, mask=there, other=0) != 0, _ALIVE, 0)
        if held is not None:
            verdict |= tl.where(tl.load(held + slot, mask=there, other=0) != 0, _HELD, 0)
        tl.store(at + _SLOT, slot, mask=there)
        tl.store(at + _TOKEN, tl.load(state.last_token + slot, mask=there, other=0).to(tl.int32), mask=there)
        tl.store(at + _LENGTH, tl.load(state.seq_len + slot, mask=there, other=0).to(tl.int32), mask=there)
        tl.store(at + _VERDICT, verdict, mask=there)
    else:
        slot = tl.load(at + _SLOT, mask=there, other=0)
        verdict = tl.load(at + _VERDICT, mask=there, other=0)
        tl.store(state.last_token + slot, tl.load(at + _TOKEN, mask=there, other=0), mask=there)
        tl.store(state.seq_len + slot, tl.load(at + _LENGTH, mask=there, other=0), mask=there)
        tl.store(state.alive + slot, ((verdict & _ALIVE) != 0).to(tl.int8), mask=there)
        if held is not None:
            tl.store(held + slot, ((verdict & _HELD) != 0).to(tl.int8), mask=there)


def take_over_sampled(
    num_rows: int, slots: torch.Tensor, state: RowState, held: torch.Tensor | None, ranks: Ranks
) -> None:
    """Copy S's rows from the first rank to every rank. slots: int32, one a row, equal on every rank. held: int8
    [slots], if rows may be held.
    """
    words = torch.empty((num_rows, _WORDS), dtype=torch.int32, device=slots.device)
    copied = (state.columns, slots, held, words, num_rows)
    grid, is_first = (triton.cdiv(num_rows, _ROWS),), ranks.shard.is_first
    if is_first:
        _words_kernel[grid](*copied, ROWS=_ROWS, PACKS=True, num_warps=4)
    ranks.spread(words)
    if not is_first:
        _words_kernel[grid](*copied, ROWS=_ROWS, PACKS=False, num_warps=4)


def take_over_drafts(
    num_rows: int, count: int, slots: torch.Tensor, proposed: torch.Tensor, drafted: torch.Tensor, ranks: Ranks
) -> None:
    """Copy the first rank's drafts to every rank before F. count: most drafts of a row. slots: int32 [rows or more].
    proposed: int32 [slots, K]. drafted: int32 [slots].
    """
    rows = slots[:num_rows].long()
    words = torch.cat((drafted[rows, None], proposed[rows, :count]), 1)
    ranks.spread(words)
    if not ranks.shard.is_first:
        drafted[rows] = words[:, 0]
        proposed[rows, :count] = words[:, 1:]
