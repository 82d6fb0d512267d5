"""Sums over the GPUs of one host: each rank pushes its partial into its peers' memory and polls its own.

A bfloat16 partial goes into every peer's slot of the step. −0.0 marks a number that is not there yet, so a partial of
−0.0 is pushed as +0.0, and data need no flag. A reader writes −0.0 back. A large sum has several steps, and a channel
pushes step s + 1 before it reads step s, so that the link is busy meanwhile. Four slots suffice: a rank pushes step
s + 4 after it has read step s + 2, which its peer pushed after the peer had read step s.

Large sums of more than two ranks are shared: partials of a tile go to one rank, which pushes their rounded sum into the
same position of every peer. The bits are the same. Such a sum has one step.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works, let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.norms import exact_square
from runahead.runtime.kernels.triton.ranks.waits import (
    CHANNELS,
    DEAD_AT,
    SLOTS_OF,
    Counters,
    Mailboxes,
    count_wait,
    device_ns,
    tried,
)

CAPACITY: Final = 1 << 14  # numbers that a channel reduces in one step
# From 1 MiB on more than two ranks sum a part each: 2 / N of the bytes, for one wait more. Two would save no byte.
SHARED_NUMBERS: Final = 1 << 19
_SMALL_BLOCK: Final = 1024
MOST_PARTS: Final = 8  # of a row, a channel each, where there are channels for all rows
LEAST_PART: Final = 1024  # numbers
_LARGE_BLOCK: Final = 4096
_EMPTY = tl.constexpr(-32768)  # the bits of -0.0 in bfloat16
_CAPACITY = tl.constexpr(CAPACITY)


@triton.jit
def _taken(at, ok, state, step, wait_words, peer, BLOCK: tl.constexpr):
    """Wait for the bits that a peer pushes to these addresses, and clear them. state: (whether a wait was given up,
    tries, when the first long wait began, ns of all waits). Returns (int16 bits, the new state)."""
    dead, tries, begun, waited = state
    bits = tl.load(at, mask=ok, other=0, volatile=True)
    if tl.max((bits == _EMPTY).to(tl.int32), 0) > 0:
        since = device_ns()
        while (tl.max((bits == _EMPTY).to(tl.int32), 0) > 0) & (dead == 0):
            tries, begun, dead = tried(tries, begun, dead, wait_words, step + 1, peer)
            bits = tl.load(at, mask=ok, other=0, volatile=True)
        waited += device_ns() - since
    tl.store(at, tl.full([BLOCK], _EMPTY, tl.int16), mask=ok)
    return bits, (dead, tries, begun, waited)


@triton.jit
def _pushed(bits):
    """Return the bits to push: -0.0 becomes +0.0."""
    return tl.where(bits == _EMPTY, 0, bits).to(tl.int16)


@triton.jit
def _use_sum(
    x, residual, gamma, scaled, squares, stride, total, old, tile, o, i, ok, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Leave the sum of a tile, bfloat16, as `_reduce_kernel` says. old: of the residual, [BLOCK]."""
    if ADDS:
        value = total.to(tl.float32) + old.to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(residual + o, rounded, mask=ok)
        value = rounded.to(tl.float32)
        part = tile % PARTS
        following = tl.load(gamma + part * WIDTH + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(scaled + o, (value * following).to(tl.bfloat16), mask=ok)
        tl.store(squares + part * stride + tile // PARTS, tl.sum(exact_square(rounded), 0))
    else:
        tl.store(x + o, total, mask=ok)


@triton.jit
def _reduce_kernel(
    x, residual, gamma, scaled, squares, stride, peers, steps, wait_words, n, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DIVIDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sum bfloat16 partials over the ranks, in tiles of WIDTH of their n numbers, a channel a program.

    peers: the ranks' mailboxes. ADDS: a row is PARTS tiles, and its sum is added to the residual and goes on as in
    `separate_epilogue`; stride: between the squares of two parts. DIVIDED: each rank sums a part of the tiles and
    pushes the sums, in one step.
    """
    let_dependents_start(DEPENDENT)
    wait_for_predecessors(DEPENDENT)
    channel, channels = tl.program_id(0), tl.num_programs(0)
    begun_at = tl.load(steps + channel)
    dead = (tl.load(wait_words.control + DEAD_AT) != 0).to(tl.int32)
    TILES: tl.constexpr = _CAPACITY // BLOCK  # of a step, at most
    box = channel.to(tl.int64) * (SLOTS_OF * RANKS * _CAPACITY)
    i = tl.arange(0, BLOCK)
    tiles = tl.cdiv(tl.cdiv(n, WIDTH) - channel, channels)
    count = tl.cdiv(tiles, TILES)
    state = (dead, tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64))
    first = (RANK + RANKS - channel % RANKS) % RANKS if DIVIDED else 0
    for s in range(count + 1):  # a step is pushed before the one before it is read
        slot = box + ((begun_at + s) & (SLOTS_OF - 1)) * (RANKS * _CAPACITY)
        for turn in range(s * TILES, tl.minimum((s + 1) * TILES, tiles)):
            o = (channel + turn * channels) * WIDTH + i
            ok = (i < WIDTH) if ADDS else (o < n)
            bits = _pushed(tl.load(x + o, mask=ok, other=0.0).to(tl.int16, bitcast=True))
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    wanted = (ok & ((channel + turn) % RANKS == peer)) if DIVIDED else ok
                    tl.store(peers[peer] + slot + RANK * _CAPACITY + (turn - s * TILES) * BLOCK + i, bits, mask=wanted)
        step = begun_at + s - 1
        slot = box + (step & (SLOTS_OF - 1)) * (RANKS * _CAPACITY)
        for turn in range(tl.maximum(s - 1, 0) * TILES + first, tl.minimum(s * TILES, tiles), RANKS if DIVIDED else 1):
            tile = channel + turn * channels
            o = tile * WIDTH + i
            ok = (i < WIDTH) if ADDS else (o < n)
            own = tl.load(x + o, mask=ok, other=0.0).to(tl.int16, bitcast=True)
            old = tl.load(residual + o, mask=ok, other=0.0) if ADDS else own
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(RANKS):
                bits = own
                if peer != RANK:
                    at = peers[RANK] + slot + peer * _CAPACITY + (turn - (s - 1) * TILES) * BLOCK + i
                    bits, state = _taken(at, ok, state, step, wait_words, peer, BLOCK)
                total += _pushed(bits).to(tl.bfloat16, bitcast=True).to(tl.float32)
            rounded = total.to(tl.bfloat16)
            if DIVIDED:
                bits = _pushed(rounded.to(tl.int16, bitcast=True))
                for peer in tl.static_range(RANKS):
                    if peer != RANK:
                        tl.store(peers[peer] + slot + RANK * _CAPACITY + turn * BLOCK + i, bits, mask=ok)
                rounded = bits.to(tl.bfloat16, bitcast=True)  # as the others have it
            _use_sum(x, residual, gamma, scaled, squares, stride, rounded, old, tile, o, i, ok, WIDTH, PARTS, ADDS)
    if DIVIDED:
        slot = box + (begun_at & (SLOTS_OF - 1)) * (RANKS * _CAPACITY)
        for away in range(1, RANKS):
            peer = (RANK + away) % RANKS
            for turn in range((peer + RANKS - channel % RANKS) % RANKS, tiles, RANKS):
                tile = channel + turn * channels
                o = tile * WIDTH + i
                ok = (i < WIDTH) if ADDS else (o < n)
                at = peers[RANK] + slot + peer * _CAPACITY + turn * BLOCK + i
                bits, state = _taken(at, ok, state, begun_at, wait_words, peer, BLOCK)
                rounded = _pushed(bits).to(tl.bfloat16, bitcast=True)
                old = tl.load(residual + o, mask=ok, other=0.0) if ADDS else bits
                _use_sum(x, residual, gamma, scaled, squares, stride, rounded, old, tile, o, i, ok, WIDTH, PARTS, ADDS)
    count_wait(state[3], channel, wait_words)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(steps + channel, begun_at + count)


def _is_divided(numbers: int, ranks: int) -> bool:
    """Return whether each rank sums a share of the numbers, instead of all of them. All ranks decide alike."""
    return ranks > 2 and numbers >= SHARED_NUMBERS


def push_reduce(partial: torch.Tensor, rank: int, boxes: Mailboxes, counters: Counters) -> None:
    """Replace `partial`, bfloat16 and contiguous, by the sum over ranks: in rank order, in float32, rounded once."""
    assert partial.is_contiguous() and partial.dtype == torch.bfloat16
    flat, ranks = partial.view(-1), len(boxes.parts)
    divided = _is_divided(flat.shape[0], ranks)
    for piece in flat.split(CHANNELS * CAPACITY if divided else flat.shape[0]):
        n = piece.shape[0]
        block = _SMALL_BLOCK if n <= CHANNELS * _SMALL_BLOCK else _LARGE_BLOCK
        _reduce_kernel[(min(CHANNELS, triton.cdiv(n, block)),)](
            piece, piece, piece, piece, counters.wait_words.control, 0, boxes.parts, counters.reduces,
            counters.wait_words, n, WIDTH=block, PARTS=1, RANK=rank, RANKS=ranks, BLOCK=block, ADDS=False,
            DIVIDED=divided, DEPENDENT=False, num_warps=4 if block == _SMALL_BLOCK else 8,
        )  # fmt: skip


def parts_of_rows(rows: int, width: int, most: int) -> int:
    """Into how many equal parts rows of `width` numbers are cut, so that few rows have more channels. most: parts that
    there is room for."""
    parts = MOST_PARTS
    while parts > 1 and (parts > most or rows * parts > CHANNELS or width % parts or width < parts * LEAST_PART):
        parts //= 2
    return parts


def push_reduce_add(
    partial: torch.Tensor,
    residual: torch.Tensor,
    following: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    rank: int,
    boxes: Mailboxes,
    counters: Counters,
) -> int:
    """`residual += ` what `push_reduce` makes of `partial`, bfloat16 [T, H] contiguous, and the rest of
    `separate_epilogue.add_scaled`, in one kernel. following: [H], the norm's weight. `partial` stays as it is. Returns
    the number of parts of a row, each of which has its own row of `squares`."""
    rows, width = partial.shape
    parts, ranks = parts_of_rows(rows, width, squares.shape[0]), len(boxes.parts)
    part = width // parts
    block = triton.next_power_of_2(part)
    assert block <= CAPACITY, "a row is longer than a mailbox"
    divided, dependent = _is_divided(rows * width, ranks), dependent_launch_works()
    most = CHANNELS * (CAPACITY // block) // parts if divided else rows
    for begin in range(0, rows, most):
        there = slice(begin, min(rows, begin + most))
        count = there.stop - begin
        _reduce_kernel[(min(CHANNELS, count * parts),)](
            partial[there], residual[there], following, scaled[there], squares[:, begin:], squares.stride(0),
            boxes.parts, counters.reduces, counters.wait_words, count * width, WIDTH=part, PARTS=parts, RANK=rank,
            RANKS=ranks, BLOCK=block, ADDS=True, DIVIDED=divided, DEPENDENT=dependent,
            num_warps=max(4, min(block // 512, 8)), enable_fp_fusion=False, launch_pdl=dependent,
        )  # fmt: skip
    return parts
