"""Exchange data of sampled rows between the GPUs of one host: logits, the best tokens of each part, sampled tokens.

Gather: the first rank says that its buffer is free, the others write their columns, then a flag behind a fence.

Best: each rank pushes the highest score of its part of the vocabulary and its token to every peer.

Spread: the first rank pushes its sampled tokens. The others push their step back. A spread, of which every launch has
one, stores for the host how long the rank has waited.

Pushed words have 64 bits, of which the upper half is the step. Two slots suffice: a rank that pushes step s has had a
word of step s - 1 from each rank that it pushes to, which comes after that rank has read step s - 2.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ranks.waits import (
    CHANNELS,
    CHANNELS_OF,
    DEAD_AT,
    SLOTS_OF,
    WAITED_AT,
    Counters,
    Mailboxes,
    count_wait,
    device_ns,
    tried,
    wait_for_flag,
)

WORDS: Final = 1 << 14  # of a spread, at most
ROW_WORDS: Final = 32  # words that a channel pushes in one step of `best`, at most: two a row
_BLOCK: Final = 1024
_WORDS = tl.constexpr(WORDS)
_ROW_WORDS = tl.constexpr(ROW_WORDS)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)  # above all ids, as the sampler has it


@triton.jit
def _gather_kernel(
    part, indexes, whole, flags, steps, wait_words, rows, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Copy this rank's columns, float32 [rows, WIDTH], into the first rank's rows, a channel a program."""
    channel, channels = tl.program_id(0), tl.num_programs(0)
    tag = tl.load(steps + channel) + 1
    dead = (tl.load(wait_words.control + DEAD_AT) != 0).to(tl.int32)
    if RANK == 0:
        for peer in tl.static_range(1, RANKS):
            tl.atomic_xchg(flags[peer] + channel, tag, sem="release", scope="sys")
    else:
        dead, waited = wait_for_flag(flags[RANK] + channel, tag, dead, wait_words, 0)
        count_wait(waited, channel, wait_words)
    i = tl.arange(0, BLOCK)
    for tile in range(channel, rows * tl.cdiv(WIDTH, BLOCK), channels):
        row = tile // tl.cdiv(WIDTH, BLOCK)
        column = tile % tl.cdiv(WIDTH, BLOCK) * BLOCK + i
        source = row
        if INDEXED:
            source = tl.load(indexes + row)
        found = tl.load(part + source.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
        tl.store(whole + row * (RANKS * WIDTH) + RANK * WIDTH + column, found, mask=column < WIDTH)
    tl.debug_barrier()  # every warp has stored its numbers
    if RANK == 0:
        for peer in tl.static_range(1, RANKS):
            at = flags[RANK] + peer * CHANNELS_OF + channel
            dead, waited = wait_for_flag(at, tag, dead, wait_words, peer)
            count_wait(waited, channel, wait_words)
    else:
        tl.atomic_xchg(flags[0] + RANK * CHANNELS_OF + channel, tag, sem="release", scope="sys")
    tl.debug_barrier()
    tl.store(steps + channel, tag)


@triton.jit
def _best_kernel(
    scores, tokens, peers, steps, wait_words, rows, TILES: tl.constexpr, OWN: tl.constexpr,
    OWN_PAD: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Exchange the ranks' best tokens and their scores, a channel a program, whose one warp polls a word at a time.

    scores: float32 [rows, TILES]; tokens: int32 [rows, TILES]: the first OWN are this rank's, the others get the
    peers' best. peers: the ranks' mailboxes.
    """
    channel, channels = tl.program_id(0), tl.num_programs(0)
    tag = tl.load(steps + channel) + 1
    dead = (tl.load(wait_words.control + DEAD_AT) != 0).to(tl.int32)
    box = channel.to(tl.int64) * (SLOTS_OF * RANKS * _ROW_WORDS) + (tag & (SLOTS_OF - 1)) * (RANKS * _ROW_WORDS)
    mark = tag.to(tl.int64) << 32
    count = tl.cdiv(rows - channel, channels)
    t = tl.arange(0, OWN_PAD)
    for n in range(count):
        at = (channel + n * channels).to(tl.int64) * TILES + t
        score = tl.load(scores + at, mask=t < OWN, other=float("-inf"))
        token = tl.load(tokens + at, mask=t < OWN, other=_NO_TOKEN)
        highest = tl.max(score, 0)
        chosen = tl.min(tl.where(score == highest, token, _NO_TOKEN), 0)
        bits = highest.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                to = peers[peer] + box + RANK * _ROW_WORDS + 2 * n
                tl.store(to, bits | mark)
                tl.store(to + 1, chosen.to(tl.int64) | mark)
    tries, begun = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    waited = tl.full([], 0, tl.int64)
    for n in range(count):
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                at = peers[RANK] + box + peer * _ROW_WORDS + 2 * n
                score, token = tl.load(at, volatile=True), tl.load(at + 1, volatile=True)
                if (score >> 32 != tag) | (token >> 32 != tag):
                    since = device_ns()
                    while ((score >> 32 != tag) | (token >> 32 != tag)) & (dead == 0):
                        tries, begun, dead = tried(tries, begun, dead, wait_words, tag, peer)
                        score, token = tl.load(at, volatile=True), tl.load(at + 1, volatile=True)
                    waited += device_ns() - since
                out = (channel + n * channels).to(tl.int64) * TILES + OWN + (peer if peer < RANK else peer - 1)
                tl.store(scores + out, score.to(tl.int32).to(tl.float32, bitcast=True))
                tl.store(tokens + out, token.to(tl.int32))
    count_wait(waited, channel, wait_words)
    tl.debug_barrier()
    tl.store(steps + channel, tag)


@triton.jit
def _spread_kernel(
    words, peers, flags, steps, wait_words, waited_for_host, n, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace n words, int32, by the first rank's, in one program, and store how long this rank has waited.

    peers: the ranks' mailboxes. waited_for_host: int64 [1], ns.
    """
    waited = tl.load(wait_words.control + WAITED_AT)
    tag = tl.load(steps) + 1
    dead = (tl.load(wait_words.control + DEAD_AT) != 0).to(tl.int32)
    slot = (tag & (SLOTS_OF - 1)) * _WORDS
    i = tl.arange(0, BLOCK)
    if RANK == 0:
        for begin in range(0, n, BLOCK):
            ok = begin + i < n
            word = tl.load(words + begin + i, mask=ok, other=0).to(tl.int64) & 0xFFFFFFFF
            for peer in tl.static_range(1, RANKS):
                tl.store(peers[peer] + slot + begin + i, word | (tag.to(tl.int64) << 32), mask=ok)
        for peer in tl.static_range(1, RANKS):
            dead, more = wait_for_flag(flags[RANK] + peer, tag, dead, wait_words, peer)
            waited += more
    else:
        tl.atomic_xchg(flags[0] + RANK, tag, sem="release", scope="sys")
        tries, begun = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
        for begin in range(0, n, BLOCK):
            ok = begin + i < n
            at = peers[RANK] + slot + begin + i
            word = tl.load(at, mask=ok, other=0, volatile=True)
            if tl.max(((word >> 32 != tag) & ok).to(tl.int32), 0) > 0:
                since = device_ns()
                while (tl.max(((word >> 32 != tag) & ok).to(tl.int32), 0) > 0) & (dead == 0):
                    tries, begun, dead = tried(tries, begun, dead, wait_words, tag, 0)
                    word = tl.load(at, mask=ok, other=0, volatile=True)
                waited += device_ns() - since
            tl.store(words + begin + i, word.to(tl.int32), mask=ok)
    tl.debug_barrier()
    tl.store(wait_words.control + WAITED_AT, waited)
    tl.store(waited_for_host, waited)
    tl.store(steps, tag)


def push_best(
    scores: torch.Tensor, tokens: torch.Tensor, rows: int, rank: int, boxes: Mailboxes, counters: Counters
) -> None:
    """See `DeviceRanks.best`."""
    ranks, tiles = len(boxes.bests), scores.shape[1]
    own, most = tiles - (ranks - 1), CHANNELS * (ROW_WORDS // 2)
    for begin in range(0, rows, most):
        count = min(rows - begin, most)
        _best_kernel[(min(CHANNELS, count),)](
            scores[begin:], tokens[begin:], boxes.bests, counters.bests, counters.wait_words, count, TILES=tiles,
            OWN=own, OWN_PAD=triton.next_power_of_2(own), RANK=rank, RANKS=ranks, num_warps=1,
        )  # fmt: skip


def push_gather(
    part: torch.Tensor, indexes: torch.Tensor | None, rank: int, boxes: Mailboxes, counters: Counters
) -> None:
    """Push rows to the first rank. part: float32 [rows, width], contiguous. indexes: int [n], of the rows; None: all. n
    is the same on all ranks. Then `boxes.whole`, float32 [n, ranks * width], has them side by side on the first rank,
    until its next gather."""
    width = part.shape[1]
    rows = part.shape[0] if indexes is None else indexes.shape[0]
    _gather_kernel[(min(CHANNELS, rows * triton.cdiv(width, _BLOCK)),)](
        part, part if indexes is None else indexes, boxes.whole, boxes.gather_flags, counters.gathers,
        counters.wait_words, rows, WIDTH=width, RANK=rank, RANKS=len(boxes.parts), BLOCK=_BLOCK,
        INDEXED=indexes is not None, num_warps=4,
    )  # fmt: skip


def push_spread(words: torch.Tensor, rank: int, boxes: Mailboxes, counters: Counters) -> None:
    """Replace `words`, int32 and contiguous, by the first rank's."""
    flat = words.view(-1)
    for begin in range(0, flat.shape[0], WORDS):
        piece = flat[begin : begin + WORDS]
        _spread_kernel[(1,)](
            piece, boxes.words, boxes.spread_flags, counters.spreads, counters.wait_words, counters.waited,
            piece.shape[0], RANK=rank, RANKS=len(boxes.parts), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
