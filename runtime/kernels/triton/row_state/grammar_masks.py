"""Grammar masks on a GPU, and S's first kernel, which decides which rows are held.

Another process writes masks to memory that this GPU reads. One program a row reads its lines once: the mask of the
row's next position, and those behind its drafts up to the first missing one. It copies a line to the GPU and validates
the copy, like `MaskMemory`. Later kernels of the launch use the verdict and the copies: later writes are for the next
launch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import weakref
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.drafts import DraftState
from runahead.runtime.kernels.triton.row_state.record import long_of, offset_of
from runahead.runtime.masks import mask_memory
from runahead.runtime.masks.mask_memory import MaskMemory, checksum_weights

_TILE: Final = 1024  # words of a tile
_MASK_EPOCH = offset_of("mask_epoch")
_EPOCH = tl.constexpr(mask_memory.EPOCH)
_POSITION = tl.constexpr(mask_memory.POSITION)
_RUN = tl.constexpr(mask_memory.RUN)
_CHECKSUM = tl.constexpr(mask_memory.CHECKSUM)
_TAG_WORDS = tl.constexpr(mask_memory.TAG_WORDS)
_BASIS = tl.constexpr(mask_memory.BASIS)


class MaskState(NamedTuple):
    """Masks of S row slots, the last one unused. A line has W words of 64 bits (`MaskMemory`), a line of forced tokens
    V.
    """

    lines: torch.Tensor  # int64 [S - 1, 1 + drafts, W] mapped, written by the mask worker
    forced: torch.Tensor  # int64 [S - 1, V] mapped too: tokens forced by grammars
    weights: torch.Tensor  # int64 [max(W, V)] weights of the checksums
    copies: torch.Tensor  # int64 [S, 1 + drafts, W] the lines that the newest S has validated
    samples: (
        torch.Tensor
    )  # int8 [S] whether the newest S samples the row: it is alive, and has its mask if it needs one
    held: torch.Tensor  # int8 [S] whether the newest S found no mask for the row's position
    words: torch.Tensor  # int32 [S, 1 + drafts, 2 W] the memory of `copies`
    mask_at: int  # index of the mask's first word in `words`


def make_mask_state(memory: MaskMemory, device: torch.device) -> MaskState:
    """Make the state, with no row held. On CUDA the memory is mapped, so that kernels read it in place.

    Raises OSError if it can't be mapped.
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
    """Pin the memory for the GPU until it is freed. Memory that an earlier program mapped is left as it is: the driver
    refuses to map it twice.

    Raises OSError if it can't be mapped, without a cause: the driver's "out of memory" means host memory here, which a
    smaller KV pool would not free.
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
    """Load a 64-bit word with acquire semantics: later loads are at least as new."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["width"])
def _judge_kernel(
    sample_slots, state, masks, drafts, width, LINES: tl.constexpr, WORDS: tl.constexpr, DRAFTS: tl.constexpr,
    RUN_PAD: tl.constexpr, NULL_SLOT: tl.constexpr, ACQUIRE: tl.constexpr, VERIFIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Validate the masks of one row. ACQUIRE: False in Triton's interpreter, which has no such instruction. drafts:
    rows may have any. VERIFIES: this S verifies them.
    """
    row = tl.program_id(0)
    slot = tl.load(sample_slots + row).to(tl.int64)
    if slot != NULL_SLOT:
        is_alive = tl.load(state.alive + slot) != 0
        epoch = long_of(state.parameters, slot, _MASK_EPOCH)
        is_held = tl.full([], 0, tl.int32)
        if is_alive & (epoch != 0):
            position = tl.load(state.seq_len + slot).to(tl.int64)
            verified = tl.full([], 0, tl.int32)
            if drafts is not None:
                verified = tl.minimum(tl.load(drafts.drafted + slot), width - 1)
            found = tl.full([], 0, tl.int32)  # consecutive masks found
            for count in range(0, verified + 1):
                if found == count:
                    line = masks.lines + (slot * LINES + count) * WORDS
                    copy = masks.copies + (slot * LINES + count) * WORDS
                    if ACQUIRE:  # by each thread: its later loads are as new as the newest tag
                        acquired(line + _POSITION)
                    summed = tl.zeros([TILE], tl.int64)
                    checksum = tl.zeros([TILE], tl.int64)
                    differing = tl.zeros([TILE], tl.int32)
                    for first in range(0, WORDS, TILE):
                        i = first + tl.arange(0, TILE)
                        word = tl.load(line + i, mask=i < WORDS, other=0, volatile=True)
                        tl.store(copy + i, word, mask=i < WORDS)
                        summed += word * tl.load(masks.weights + i, mask=i < WORDS, other=0)
                        checksum += tl.where(i == _CHECKSUM, word, 0)
                        differing |= ((i == _EPOCH) & (word != epoch)).to(tl.int32)
                        differing |= ((i == _POSITION) & (word != position)).to(tl.int32)
                        differing |= ((i == _RUN) & (word != count)).to(tl.int32)
                        if drafts is not None:
                            at = 2 * (i - _TAG_WORDS)  # of the first of two drafts in a word
                            proposed = drafts.proposed + slot * DRAFTS + at
                            has_first, has_second = (at >= 0) & (at < count), (at >= 0) & (at + 1 < count)
                            differs = has_first & (word.to(tl.int32) != tl.load(proposed, mask=has_first, other=0))
                            second = tl.load(proposed + 1, mask=has_second, other=0)
                            differs = differs | (has_second & ((word >> 32).to(tl.int32) != second))
                            differing |= differs.to(tl.int32)
                    is_whole = (tl.sum(summed, 0) ^ _BASIS) == tl.sum(checksum, 0)
                    found = tl.where(is_whole & (tl.max(differing, 0) == 0), found + 1, found)
            is_held = tl.where(found == 0, 1, 0)
            if drafts is not None:
                if found > 0:  # a draft without a following mask is dropped
                    tl.store(drafts.drafted + slot, found - 1)
                    if VERIFIES:
                        n = tl.arange(0, RUN_PAD)
                        nobody = tl.full([RUN_PAD], NULL_SLOT, tl.int32)
                        tl.store(drafts.verify_slots + row * width + n, nobody, mask=(n >= found) & (n < width))
        tl.store(masks.held + slot, is_held.to(tl.int8))
        tl.store(masks.samples + slot, (is_alive & (is_held == 0)).to(tl.int8))


def judge(
    num_rows: int,
    sample_slots: torch.Tensor,
    state: RowState,
    masks: MaskState,
    drafts: DraftState | None = None,
    width: int = 1,
) -> None:
    """Validate a launch's masks once: sets `held`, `samples` and the copies for the first `num_rows` entries of the row
    list, int32 [R]. Entries of the null slot are skipped.

    drafts: of rows that may have any. A held row keeps its drafts; another keeps those with masks behind them, at most
    width - 1. The rest of its entries in `verify_slots` become unused.
    """
    most = 1 if drafts is None else drafts.most
    _judge_kernel[(num_rows,)](
        sample_slots,
        state.columns,
        masks,
        drafts,
        width,
        LINES=masks.lines.shape[1],
        WORDS=masks.lines.shape[2],
        DRAFTS=most,
        RUN_PAD=triton.next_power_of_2(1 + most),
        NULL_SLOT=state.slots - 1,
        ACQUIRE=masks.held.device.type != "cpu",
        VERIFIES=drafts is not None and width > 1,
        TILE=min(_TILE, triton.next_power_of_2(masks.lines.shape[2])),
        num_warps=4,
    )
