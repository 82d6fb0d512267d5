"""Masks of rows with a grammar on a GPU, and the first kernel of an S that looks for them: whose mask is there, and who
is held.

Masks lie in memory that another process writes while this GPU reads it. One program a row looks at its lines, each
once: that of the row's next position, and those behind its drafts up to the first whose mask is not there. It copies a
line to the GPU, and judges by that copy alone, as `MaskMemory` does. Every later kernel of the launch goes by its
verdict and by the copies: what is written meanwhile is for the next launch.
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
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.record import long_of, offset_of
from runahead.runtime.masks import mask_memory
from runahead.runtime.masks.mask_memory import MaskMemory, checksum_weights

_TILE: Final = 1024  # words that a program looks at together
_MASK_EPOCH = offset_of("mask_epoch")
_EPOCH = tl.constexpr(mask_memory.EPOCH)
_POSITION = tl.constexpr(mask_memory.POSITION)
_RUN = tl.constexpr(mask_memory.RUN)
_CHECKSUM = tl.constexpr(mask_memory.CHECKSUM)
_TAG_WORDS = tl.constexpr(mask_memory.TAG_WORDS)
_BASIS = tl.constexpr(mask_memory.BASIS)


@dataclass(frozen=True, slots=True)
class MaskState:
    """Of S row slots, the last of which is nobody's. A line has W words of 64 bits, as `MaskMemory` says; one of forced
    tokens has V."""

    lines: torch.Tensor  # int64 [S - 1, 1 + drafts, W] mapped: the mask worker writes it
    forced: torch.Tensor  # int64 [S - 1, V] mapped, too: what grammars force
    weights: torch.Tensor  # int64 [W, or V if that is more] of the checksums
    copies: torch.Tensor  # int64 [S, 1 + drafts, W] the lines that the newest S has judged
    samples: (
        torch.Tensor
    )  # int8 [S] the newest S to look at the row samples it: it is alive, and has its mask if it needs one
    held: torch.Tensor  # int8 [S] the newest S to look at the row had no mask for its position
    words: torch.Tensor  # int32 [S, 1 + drafts, 2 W] the same memory as `copies`
    mask_at: int  # the first word of the mask among these


def make_mask_state(memory: MaskMemory, device: torch.device) -> MaskState:
    """Nobody is held. The memory stays where it is: on CUDA it is mapped, so that kernels read it in place.

    Raises OSError where it can't be mapped.
    """
    if device.type == "cuda":
        map_once(memory)
    _, drafted, words = memory.lines.shape
    slots = memory.lines.shape[0] + 1

    def flags() -> torch.Tensor:
        return torch.zeros(slots, dtype=torch.int8, device=device)

    copies = torch.zeros((slots, drafted, words), dtype=torch.int64, device=device)
    weights = torch.from_numpy(checksum_weights(max(words, memory.forced.shape[1])).copy()).to(device)
    return MaskState(
        lines=torch.from_numpy(memory.lines),
        forced=torch.from_numpy(memory.forced),
        weights=weights,
        copies=copies,
        samples=flags(),
        held=flags(),
        words=copies.view(torch.int32),
        mask_at=2 * memory.mask_at,
    )


def map_once(memory: MaskMemory) -> None:
    """Pin the memory, so that the GPU reaches it, until nobody holds it any more. What a program before has mapped is
    left as it is: the driver refuses to map memory twice.

    Raises OSError where it can't be mapped. It has no cause: what the driver calls "out of memory" here is the host's,
    and no smaller KV pool leaves more of that.
    """
    if torch.from_numpy(memory.words).is_pinned():
        return
    address, runtime = memory.words.ctypes.data, torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.words.nbytes, 0)))
    except torch.cuda.CudaError as error:
        why = str(error)
    else:
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
        return
    raise OSError(f"{memory.words.nbytes} bytes of masks can't be mapped for the GPU: {why}")


@triton.jit
def acquired(pointer):
    """The word of 64 bits there. What is read afterwards is as new as this word, or newer, whoever wrote it."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["width"])
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
    proposed,
    drafted,
    verify_slots,
    width,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    MOST: tl.constexpr,
    MOST_PAD: tl.constexpr,
    NULL_SLOT: tl.constexpr,
    ACQUIRE: tl.constexpr,
    DRAFTS: tl.constexpr,
    VERIFIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row. ACQUIRE: other than in Triton's interpreter, which knows no such instruction. DRAFTS: rows may
    have drafts. VERIFIES: this S looks at them."""
    row = tl.program_id(0)
    slot = tl.load(sample_slots + row).to(tl.int64)
    if slot != NULL_SLOT:
        is_alive = tl.load(alive + slot) != 0
        epoch = long_of(parameters, slot, _MASK_EPOCH)
        is_held = tl.full([], 0, tl.int32)
        if is_alive & (epoch != 0):
            position = tl.load(seq_len + slot).to(tl.int64)
            looked_at = tl.full([], 0, tl.int32)
            if DRAFTS:
                looked_at = tl.minimum(tl.load(drafted + slot), width - 1)
            found = tl.full([], 0, tl.int32)  # masks that are there, one behind the other
            for count in range(0, looked_at + 1):
                if found == count:
                    line = lines + (slot * LINES + count) * WORDS
                    copy = copies + (slot * LINES + count) * WORDS
                    if ACQUIRE:  # by each thread: what it reads now is as new as the newest tag that it can see
                        acquired(line + _POSITION)
                    summed = tl.zeros([TILE], tl.int64)
                    checksum = tl.zeros([TILE], tl.int64)
                    differing = tl.zeros([TILE], tl.int32)
                    for first in range(0, WORDS, TILE):
                        i = first + tl.arange(0, TILE)
                        word = tl.load(line + i, mask=i < WORDS, other=0, volatile=True)
                        tl.store(copy + i, word, mask=i < WORDS)
                        summed += word * tl.load(weights + i, mask=i < WORDS, other=0)
                        checksum += tl.where(i == _CHECKSUM, word, 0)
                        differing |= ((i == _EPOCH) & (word != epoch)).to(tl.int32)
                        differing |= ((i == _POSITION) & (word != position)).to(tl.int32)
                        differing |= ((i == _RUN) & (word != count)).to(tl.int32)
                        if DRAFTS:
                            differing |= _is_of_others(word, i, count, proposed + slot * MOST)
                    is_whole = (tl.sum(summed, 0) ^ _BASIS) == tl.sum(checksum, 0)
                    found = tl.where(is_whole & (tl.max(differing, 0) == 0), found + 1, found)
            is_held = tl.where(found == 0, 1, 0)
            if DRAFTS:
                if found > 0:  # a draft behind which there is no mask is none any more
                    tl.store(drafted + slot, found - 1)
                    if VERIFIES:
                        n = tl.arange(0, MOST_PAD)
                        nobody = tl.full([MOST_PAD], NULL_SLOT, tl.int32)
                        tl.store(verify_slots + row * width + n, nobody, mask=(n >= found) & (n < width))
        tl.store(held + slot, is_held.to(tl.int8))
        tl.store(samples + slot, (is_alive & (is_held == 0)).to(tl.int8))


@triton.jit
def _is_of_others(word, i, count, proposed):
    """1 for each of a line's words, of these numbers, that has other drafts than the first `count` of a row."""
    first = 2 * (i - _TAG_WORDS)  # of the two that a word has
    has_first, has_second = (first >= 0) & (first < count), (first >= 0) & (first + 1 < count)
    differs = has_first & (word.to(tl.int32) != tl.load(proposed + first, mask=has_first, other=0))
    second = tl.load(proposed + first + 1, mask=has_second, other=0)
    return (differs | (has_second & ((word >> 32).to(tl.int32) != second))).to(tl.int32)


def judge(
    num_rows: int,
    sample_slots: torch.Tensor,
    state: RowState,
    masks: MaskState,
    drafts: DraftState | None = None,
    width: int = 1,
) -> None:
    """The one look of a launch at its rows' masks: `held` and `samples` of `masks`, and the copies, of the rows at the
    first `num_rows` places of the list, int32 [R]. Places that name the null slot are passed over.

    drafts: of rows that may have any. A row that is held keeps its own. Of another one as many are left as have masks
    behind them, width - 1 at most. What lies behind these in its run is nobody's in `verify_slots`.
    """
    unused = masks.held  # in the place of what is not read
    most = 1 if drafts is None else drafts.most
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
        unused if drafts is None else drafts.proposed,
        unused if drafts is None else drafts.drafted,
        unused if drafts is None else drafts.verify_slots,
        width,
        LINES=masks.lines.shape[1],
        WORDS=masks.lines.shape[2],
        MOST=most,
        MOST_PAD=triton.next_power_of_2(1 + most),
        NULL_SLOT=state.slots - 1,
        ACQUIRE=masks.held.device.type != "cpu",
        DRAFTS=drafts is not None,
        VERIFIES=drafts is not None and width > 1,
        TILE=min(_TILE, triton.next_power_of_2(masks.lines.shape[2])),
        num_warps=4,
    )
