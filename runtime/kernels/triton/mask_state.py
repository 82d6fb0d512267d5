"""Masks of rows with a grammar on a GPU, and the first kernel of an S that looks for them: whose mask is there, and who
is held.

Masks lie in memory that another process writes while this GPU reads it. One program a row looks at its line once: it
copies the line to the GPU, and judges by that copy alone, as `MaskMemory.read` does. Every later kernel of the launch
goes by its verdict and by the copy: what is written meanwhile is for the next launch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_parameters import long_of, place_of
from runahead.runtime.masks import mask_memory
from runahead.runtime.masks.mask_memory import MaskMemory, checksum_weights

_TILE: Final = 1024  # words that a program looks at together
_MASK_EPOCH = place_of("mask_epoch")
_EPOCH = tl.constexpr(mask_memory.EPOCH)
_POSITION = tl.constexpr(mask_memory.POSITION)
_RUN = tl.constexpr(mask_memory.RUN)
_CHECKSUM = tl.constexpr(mask_memory.CHECKSUM)
_BASIS = tl.constexpr(mask_memory.BASIS)


@dataclass(frozen=True, slots=True)
class MaskState:
    """Of S row slots, the last of which is nobody's. A line has W words of 64 bits, as `MaskMemory` says."""

    lines: torch.Tensor  # int64 [S - 1, 1 + drafts, W] mapped: the mask worker writes it
    weights: torch.Tensor  # int64 [W] of the checksum
    copies: torch.Tensor  # int64 [S, W] the lines that the newest S has judged
    samples: (
        torch.Tensor
    )  # int8 [S] the newest S to look at the row samples it: it is alive, and has its mask if it needs one
    held: torch.Tensor  # int8 [S] the newest S to look at the row had no mask for its position
    words: torch.Tensor  # int32 [S, 2 W] the same memory as `copies`
    mask_at: int  # the first word of the mask among these


def make_mask_state(memory: MaskMemory, device: torch.device) -> MaskState:
    """Nobody is held. The memory stays where it is: on CUDA it is mapped, so that kernels read it in place.

    Raises torch.cuda.CudaError where it can't be mapped.
    """
    if device.type == "cuda":
        _map(memory)
    slots, words = memory.lines.shape[0] + 1, memory.lines.shape[2]

    def flags() -> torch.Tensor:
        return torch.zeros(slots, dtype=torch.int8, device=device)

    copies = torch.zeros((slots, words), dtype=torch.int64, device=device)
    weights = torch.from_numpy(checksum_weights(words).copy()).to(device)
    at = 2 * memory.mask_at
    return MaskState(torch.from_numpy(memory.lines), weights, copies, flags(), flags(), copies.view(torch.int32), at)


def _map(memory: MaskMemory) -> None:
    """Pin the memory, so that the GPU reaches it, until nobody holds it any more."""
    address, runtime = memory.words.ctypes.data, torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.words.nbytes, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


@triton.jit
def _acquired(pointer):
    """The word of 64 bits there. What is read afterwards is as new as this word, or newer, whoever wrote it."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _judge_kernel(
    sample_slots,
    alive,
    seq_len,
    parameters,
    lines,
    weights,
    copies,
    samples,
    held,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    ACQUIRE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row. ACQUIRE: other than in Triton's interpreter, which knows no such instruction."""
    slot = tl.load(sample_slots + tl.program_id(0)).to(tl.int64)
    if slot != NULL_SLOT:
        is_alive = tl.load(alive + slot) != 0
        epoch = long_of(parameters, slot, _MASK_EPOCH)
        is_held = tl.full([], 0, tl.int32)
        if is_alive & (epoch != 0):
            position = tl.load(seq_len + slot).to(tl.int64)
            line = lines + slot * LINES * WORDS
            if ACQUIRE:
                newest = _acquired(line + _POSITION)
            else:
                newest = tl.load(line + _POSITION)
            is_held = tl.full([], 1, tl.int32)
            if newest == position:
                summed = tl.zeros([TILE], tl.int64)
                checksum = tl.zeros([TILE], tl.int64)
                differing = tl.zeros([TILE], tl.int32)
                for first in range(0, WORDS, TILE):
                    i = first + tl.arange(0, TILE)
                    word = tl.load(line + i, mask=i < WORDS, other=0, volatile=True)
                    tl.store(copies + slot * WORDS + i, word, mask=i < WORDS)
                    summed += word * tl.load(weights + i, mask=i < WORDS, other=0)
                    checksum += tl.where(i == _CHECKSUM, word, 0)
                    differing |= ((i == _EPOCH) & (word != epoch)).to(tl.int32)
                    differing |= ((i == _POSITION) & (word != position)).to(tl.int32)
                    differing |= ((i == _RUN) & (word != 0)).to(tl.int32)
                is_whole = (tl.sum(summed, 0) ^ _BASIS) == tl.sum(checksum, 0)
                is_held = tl.where(is_whole & (tl.max(differing, 0) == 0), 0, 1)
        tl.store(held + slot, is_held.to(tl.int8))
        tl.store(samples + slot, (is_alive & (is_held == 0)).to(tl.int8))


def judge(num_rows: int, sample_slots: torch.Tensor, state: RowState, masks: MaskState) -> None:
    """The one look of a launch at its rows' masks: `held` and `samples` of `masks`, and the copies, of the rows at the
    first `num_rows` places of the list, int32 [R]. Places that name the null slot are passed over."""
    _judge_kernel[(num_rows,)](
        sample_slots,
        state.alive.view(torch.int8),
        state.seq_len,
        state.parameters,
        masks.lines,
        masks.weights,
        masks.copies,
        masks.samples,
        masks.held,
        LINES=masks.lines.shape[1],
        WORDS=masks.lines.shape[2],
        NULL_SLOT=state.slots - 1,
        ACQUIRE=masks.held.device.type != "cpu",
        TILE=min(_TILE, triton.next_power_of_2(masks.lines.shape[2])),
        num_warps=4,
    )
