"""Exchanges between the GPUs of one host: each rank pushes its part into its peers' memory and polls its own.

A program is a *channel*. It has a part of every buffer and a step counter of its own, on the device, so that a captured
graph holds no slot and no number. The same channels take part on every rank.

Reduce: a bfloat16 partial goes into every peer's slot of the step. −0.0 marks a place that is not there yet, so a
partial of −0.0 is pushed as +0.0, and data need no flag. A reader writes −0.0 back. Two slots suffice: a peer pushes
step s + 2 when it has ended step s + 1, for which it needed this rank's push, which this rank's step s comes before.

Large sums of more than two ranks are shared: partials of a tile go to one rank, which pushes their rounded sum into the
same place of every peer. The bits are the same. Each sum of step s + 1 needs every rank's push: two slots suffice.

Gather: the first rank says that its buffer is free, the others write their columns, then a flag behind a fence.

Spread: the first rank pushes words of 64 bits, of which the upper half is the step. The others push their step back.

No wait lasts longer than a limit by the device's clock, nor longer than the abort word is 0. The rank then writes its
fault for the host, and no later exchange waits. The first channel counts how long it has waited. A spread, of which
every launch has one, stores the count for the host.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ops.norms import exact_square

CHANNELS: Final = 128  # programs of an exchange, at most: all of them run at the same time
CAPACITY: Final = 1 << 15  # numbers that a channel reduces in one step
WORDS: Final = 1 << 14  # of a spread, at most
SLOTS: Final = 2
# From so many numbers on, more than two ranks sum a share each (1 MiB). With N ranks everything to everybody is N / 2
# times the bytes of partials to their shares and sums to everybody, for one wait less. Two ranks send the same bytes.
SHARED_NUMBERS: Final = 1 << 19
_SMALL_BLOCK: Final = 1024
_LARGE_BLOCK: Final = 4096
_LOOKS: Final = 4096  # between two looks at the clock

# Words of a rank's control block, int64, on the device.
DEAD: Final = 0  # not 0: a wait was given up
LIMIT_NS: Final = 1
WAITED_NS: Final = 2  # for peers, in all
CONTROL_WORDS: Final = 8

_EMPTY = tl.constexpr(-32768)  # the bits of -0.0 in bfloat16
_SLOTS = tl.constexpr(SLOTS)
_CAPACITY = tl.constexpr(CAPACITY)
_WORDS = tl.constexpr(WORDS)
_CHANNELS = tl.constexpr(CHANNELS)
_DEAD = tl.constexpr(DEAD)
_LIMIT_NS = tl.constexpr(LIMIT_NS)
_WAITED_NS = tl.constexpr(WAITED_NS)
_LOOKS_AT_ONCE = tl.constexpr(_LOOKS)


@triton.jit
def _device_ns():
    return tl.extra.cuda.globaltimer().to(tl.int64)


@triton.jit
def _store_for_host(pointer, value):
    """Store into mapped memory, between two fences of the whole system."""
    tl.inline_asm_elementwise(
        "{ fence.acq_rel.sys; st.volatile.global.b64 [$1], $2; fence.acq_rel.sys; mov.u32 $0, 0; }",
        "=r,l,l",
        [pointer.to(tl.int64), value.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _given_up(begun, control, abort, fault, step, peer):
    """(when the wait began, 1 where it is over its limit or the ranks were told to stop)."""
    now = _device_ns()
    begun = tl.where(begun == 0, now, begun)
    dead = (tl.load(control + _DEAD, volatile=True) != 0).to(tl.int32)
    if dead == 0:
        stopped = tl.load(abort, volatile=True) != 0
        late = now - begun > tl.load(control + _LIMIT_NS, volatile=True)
        if stopped | late:
            dead = 1
            tl.store(control + _DEAD, tl.full([], 1, tl.int64))
            _store_for_host(fault + 1, tl.full([], 0, tl.int64) + peer)
            _store_for_host(fault, step.to(tl.int64))
    return begun, dead


@triton.jit
def _wait_for_flag(flag, tag, dead, control, abort, fault, PEER: tl.constexpr):
    """Until a peer's flag, int32 in this rank's memory, has reached `tag`: a peer may be a step ahead. What it has
    stored before is then seen. Returns (1 where the wait was given up, ns that it took)."""
    looks = tl.full([], 0, tl.int32)
    begun = tl.full([], 0, tl.int64)
    waited = tl.full([], 0, tl.int64)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen - tag < 0:
        since = _device_ns()
        while (seen - tag < 0) & (dead == 0):
            looks += 1
            if looks % _LOOKS_AT_ONCE == 0:
                begun, dead = _given_up(begun, control, abort, fault, tag, PEER)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        waited += _device_ns() - since
    return dead, waited


@triton.jit
def _count_wait(waited, channel, control):
    """The first channel's stands for all."""
    if (channel == 0) & (waited != 0):
        tl.atomic_add(control + _WAITED_NS, waited, sem="relaxed")


@triton.jit
def _taken(at, ok, dead, looks, begun, waited, step, control, abort, fault, peer, BLOCK: tl.constexpr):
    """(bits that a peer has pushed to these places, which are empty afterwards; dead, looks, begun and waited as they
    are then)."""
    bits = tl.load(at, mask=ok, other=0, volatile=True)
    if tl.max((bits == _EMPTY).to(tl.int32), 0) > 0:
        since = _device_ns()
        while (tl.max((bits == _EMPTY).to(tl.int32), 0) > 0) & (dead == 0):
            looks += 1
            if looks % _LOOKS_AT_ONCE == 0:
                begun, dead = _given_up(begun, control, abort, fault, step + 1, peer)
            bits = tl.load(at, mask=ok, other=0, volatile=True)
        waited += _device_ns() - since
    tl.store(at, tl.full([BLOCK], _EMPTY, tl.int16), mask=ok)
    return bits, dead, looks, begun, waited


@triton.jit
def _pushed(bits):
    """As they are pushed: -0.0 is +0.0."""
    return tl.where(bits == _EMPTY, 0, bits).to(tl.int16)


@triton.jit
def _use_sum(x, residual, gamma, scaled, squares, total, tile, o, i, ok, ADDS: tl.constexpr):
    """Leave the sum of a tile, bfloat16, as `_reduce_kernel` says."""
    if ADDS:
        value = total.to(tl.float32) + tl.load(residual + o, mask=ok, other=0.0).to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(residual + o, rounded, mask=ok)
        value = rounded.to(tl.float32)
        following = tl.load(gamma + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(scaled + o, (value * following).to(tl.bfloat16), mask=ok)
        tl.store(squares + tile, tl.sum(exact_square(value), 0))
    else:
        tl.store(x + o, total, mask=ok)


@triton.jit
def _reduce_kernel(
    x, residual, gamma, scaled, squares, peers, steps, control, abort, fault, n, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Tiles of WIDTH numbers. ADDS: a tile is a row, whose sum goes on as in `separate_epilogue._add_kernel`. SHARES:
    each rank sums its share of the tiles and pushes the sums."""
    channel, channels = tl.program_id(0), tl.num_programs(0)
    step = tl.load(steps + channel)
    dead = (tl.load(control + _DEAD) != 0).to(tl.int32)
    slot = channel.to(tl.int64) * (_SLOTS * RANKS * _CAPACITY) + (step & (_SLOTS - 1)) * (RANKS * _CAPACITY)
    i = tl.arange(0, BLOCK)
    turns = tl.cdiv(tl.cdiv(n, WIDTH) - channel, channels)
    for turn in range(turns):
        o = (channel + turn * channels) * WIDTH + i
        ok = (i < WIDTH) if ADDS else (o < n)
        bits = _pushed(tl.load(x + o, mask=ok, other=0.0).to(tl.int16, bitcast=True))
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                wanted = (ok & ((channel + turn) % RANKS == peer)) if SHARES else ok
                tl.store(peers[peer] + slot + RANK * _CAPACITY + turn * BLOCK + i, bits, mask=wanted)
    looks = tl.full([], 0, tl.int32)
    begun = tl.full([], 0, tl.int64)
    waited = tl.full([], 0, tl.int64)
    first = (RANK + RANKS - channel % RANKS) % RANKS if SHARES else 0
    for turn in range(first, turns, RANKS if SHARES else 1):
        tile = channel + turn * channels
        o = tile * WIDTH + i
        ok = (i < WIDTH) if ADDS else (o < n)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                bits = tl.load(x + o, mask=ok, other=0.0).to(tl.int16, bitcast=True)
            else:
                at = peers[RANK] + slot + peer * _CAPACITY + turn * BLOCK + i
                bits, dead, looks, begun, waited = _taken(
                    at, ok, dead, looks, begun, waited, step, control, abort, fault, peer, BLOCK
                )
            total += _pushed(bits).to(tl.bfloat16, bitcast=True).to(tl.float32)
        rounded = total.to(tl.bfloat16)
        if SHARES:
            bits = _pushed(rounded.to(tl.int16, bitcast=True))
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    tl.store(peers[peer] + slot + RANK * _CAPACITY + turn * BLOCK + i, bits, mask=ok)
            rounded = bits.to(tl.bfloat16, bitcast=True)  # as the others have it
        _use_sum(x, residual, gamma, scaled, squares, rounded, tile, o, i, ok, ADDS)
    if SHARES:
        for away in range(1, RANKS):
            peer = (RANK + away) % RANKS
            for turn in range((peer + RANKS - channel % RANKS) % RANKS, turns, RANKS):
                tile = channel + turn * channels
                o = tile * WIDTH + i
                ok = (i < WIDTH) if ADDS else (o < n)
                at = peers[RANK] + slot + peer * _CAPACITY + turn * BLOCK + i
                bits, dead, looks, begun, waited = _taken(
                    at, ok, dead, looks, begun, waited, step, control, abort, fault, peer, BLOCK
                )
                rounded = _pushed(bits).to(tl.bfloat16, bitcast=True)
                _use_sum(x, residual, gamma, scaled, squares, rounded, tile, o, i, ok, ADDS)
    _count_wait(waited, channel, control)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(steps + channel, step + 1)


@triton.jit
def _gather_kernel(
    part, whole, flags, steps, control, abort, fault, rows, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel, channels = tl.program_id(0), tl.num_programs(0)
    tag = tl.load(steps + channel) + 1
    dead = (tl.load(control + _DEAD) != 0).to(tl.int32)
    if RANK == 0:
        for peer in tl.static_range(1, RANKS):
            tl.atomic_xchg(flags[peer] + channel, tag, sem="release", scope="sys")
    else:
        dead, waited = _wait_for_flag(flags[RANK] + channel, tag, dead, control, abort, fault, 0)
        _count_wait(waited, channel, control)
    i = tl.arange(0, BLOCK)
    for tile in range(channel, rows * tl.cdiv(WIDTH, BLOCK), channels):
        row = tile // tl.cdiv(WIDTH, BLOCK)
        column = tile % tl.cdiv(WIDTH, BLOCK) * BLOCK + i
        found = tl.load(part + row * WIDTH + column, mask=column < WIDTH, other=0.0)
        tl.store(whole + row * (RANKS * WIDTH) + RANK * WIDTH + column, found, mask=column < WIDTH)
    tl.debug_barrier()  # every warp has stored its numbers
    if RANK == 0:
        for peer in tl.static_range(1, RANKS):
            at = flags[RANK] + peer * _CHANNELS + channel
            dead, waited = _wait_for_flag(at, tag, dead, control, abort, fault, peer)
            _count_wait(waited, channel, control)
    else:
        tl.atomic_xchg(flags[0] + RANK * _CHANNELS + channel, tag, sem="release", scope="sys")
    tl.debug_barrier()
    tl.store(steps + channel, tag)


@triton.jit
def _spread_kernel(
    words, peers, flags, steps, control, abort, fault, waited_for_host, n, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    waited = tl.load(control + _WAITED_NS)
    tag = tl.load(steps) + 1
    dead = (tl.load(control + _DEAD) != 0).to(tl.int32)
    slot = (tag & (_SLOTS - 1)) * _WORDS
    i = tl.arange(0, BLOCK)
    if RANK == 0:
        for begin in range(0, n, BLOCK):
            ok = begin + i < n
            word = tl.load(words + begin + i, mask=ok, other=0).to(tl.int64) & 0xFFFFFFFF
            for peer in tl.static_range(1, RANKS):
                tl.store(peers[peer] + slot + begin + i, word | (tag.to(tl.int64) << 32), mask=ok)
        for peer in tl.static_range(1, RANKS):
            dead, more = _wait_for_flag(flags[RANK] + peer, tag, dead, control, abort, fault, peer)
            waited += more
    else:
        tl.atomic_xchg(flags[0] + RANK, tag, sem="release", scope="sys")
        looks = tl.full([], 0, tl.int32)
        begun = tl.full([], 0, tl.int64)
        for begin in range(0, n, BLOCK):
            ok = begin + i < n
            at = peers[RANK] + slot + begin + i
            word = tl.load(at, mask=ok, other=0, volatile=True)
            if tl.max(((word >> 32 != tag) & ok).to(tl.int32), 0) > 0:
                since = _device_ns()
                while (tl.max(((word >> 32 != tag) & ok).to(tl.int32), 0) > 0) & (dead == 0):
                    looks += 1
                    if looks % _LOOKS_AT_ONCE == 0:
                        begun, dead = _given_up(begun, control, abort, fault, tag, 0)
                    word = tl.load(at, mask=ok, other=0, volatile=True)
                waited += _device_ns() - since
            tl.store(words + begin + i, word.to(tl.int32), mask=ok)
    tl.debug_barrier()
    tl.store(control + _WAITED_NS, waited)
    tl.store(waited_for_host, waited)
    tl.store(steps, tag)


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """What ranks write into, each entry by rank: a tensor on this rank's device, or what stands for a peer's.

    parts: int16 [CHANNELS, SLOTS, ranks, CAPACITY], all −0.0 in bfloat16 before the first step. words: int64 [SLOTS,
    WORDS]. flags: int32 [2, ranks, CHANNELS], of gathers and of spreads, all 0. whole: float32, the first rank's.
    """

    parts: tuple[Any, ...]
    words: tuple[Any, ...]
    gather_flags: tuple[Any, ...]
    spread_flags: tuple[Any, ...]
    whole: Any


@dataclass(frozen=True, slots=True)
class Counters:
    """Of this rank, on its device. reduces, gathers: int32 [CHANNELS]. spreads: int32 [1]. control: int64
    [CONTROL_WORDS]. abort, fault: int64, mapped memory of the host: not 0 is to stop; the step at which this rank gave
    up and the peer that it waited for. waited: int64 [1], the same kind of memory: ns of waits for peers so far."""

    reduces: torch.Tensor
    gathers: torch.Tensor
    spreads: torch.Tensor
    control: torch.Tensor
    abort: torch.Tensor
    fault: torch.Tensor
    waited: torch.Tensor


def _shares(numbers: int, ranks: int) -> bool:
    """Whether each rank sums a share of so many numbers, or all ranks sum all of them. Goes by what all ranks know."""
    return ranks > 2 and numbers >= SHARED_NUMBERS


def push_reduce(partial: torch.Tensor, rank: int, boxes: Mailboxes, counters: Counters) -> None:
    """Replace `partial`, bfloat16 and contiguous, by the sum over ranks: in rank order, in float32, rounded once."""
    assert partial.is_contiguous() and partial.dtype == torch.bfloat16
    flat = partial.view(-1)
    for begin in range(0, flat.shape[0], CHANNELS * CAPACITY):
        piece = flat[begin : begin + CHANNELS * CAPACITY]
        n = piece.shape[0]
        block = _SMALL_BLOCK if n <= CHANNELS * _SMALL_BLOCK else _LARGE_BLOCK
        _reduce_kernel[(min(CHANNELS, triton.cdiv(n, block)),)](
            piece, piece, piece, piece, counters.control, boxes.parts, counters.reduces, counters.control,
            counters.abort, counters.fault, n, WIDTH=block, RANK=rank, RANKS=len(boxes.parts), BLOCK=block, ADDS=False,
            SHARES=_shares(n, len(boxes.parts)), num_warps=4 if block == _SMALL_BLOCK else 8,
        )  # fmt: skip


def push_reduce_add(
    partial: torch.Tensor,
    residual: torch.Tensor,
    following: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    rank: int,
    boxes: Mailboxes,
    counters: Counters,
) -> None:
    """`residual += ` what `push_reduce` makes of `partial`, bfloat16 [T, H] contiguous, and the rest of
    `separate_epilogue.add_scaled` with the same roundings, in one kernel. following: [H], the norm's weight. `partial`
    stays as it is."""
    rows, width = partial.shape
    block = triton.next_power_of_2(width)
    most = CHANNELS * (CAPACITY // block)
    assert most, "a row is longer than a mailbox"
    for begin in range(0, rows, most):
        there = slice(begin, min(rows, begin + most))
        count = there.stop - begin
        _reduce_kernel[(min(CHANNELS, count),)](
            partial[there], residual[there], following, scaled[there], squares[0, begin:], boxes.parts,
            counters.reduces, counters.control, counters.abort, counters.fault, count * width, WIDTH=width, RANK=rank,
            RANKS=len(boxes.parts), BLOCK=block, ADDS=True, SHARES=_shares(count * width, len(boxes.parts)),
            num_warps=max(4, min(block // 512, 8)), enable_fp_fusion=False,
        )  # fmt: skip


def push_gather(part: torch.Tensor, rank: int, boxes: Mailboxes, counters: Counters) -> None:
    """part: float32 [n, width], contiguous, of the same shape on every rank. Afterwards `boxes.whole`, float32 [n,
    ranks * width], has all of them side by side on the first rank, until its next exchange of this kind."""
    rows, width = part.shape
    tiles = rows * triton.cdiv(width, _SMALL_BLOCK)
    _gather_kernel[(min(CHANNELS, tiles),)](
        part, boxes.whole, boxes.gather_flags, counters.gathers, counters.control, counters.abort, counters.fault, rows,
        WIDTH=width, RANK=rank, RANKS=len(boxes.parts), BLOCK=_SMALL_BLOCK, num_warps=4,
    )  # fmt: skip


def push_spread(words: torch.Tensor, rank: int, boxes: Mailboxes, counters: Counters) -> None:
    """Replace `words`, int32 and contiguous, by the first rank's."""
    flat = words.view(-1)
    for begin in range(0, flat.shape[0], WORDS):
        piece = flat[begin : begin + WORDS]
        _spread_kernel[(1,)](
            piece, boxes.words, boxes.spread_flags, counters.spreads, counters.control, counters.abort, counters.fault,
            counters.waited, piece.shape[0], RANK=rank, RANKS=len(boxes.parts), BLOCK=_SMALL_BLOCK, num_warps=4,
        )  # fmt: skip
