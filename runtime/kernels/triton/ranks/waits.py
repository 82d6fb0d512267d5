"""Common parts of exchanges between GPUs: mailboxes, step counters, and waits for a peer.

A program of an exchange is a *channel*. It has a part of every buffer and a step counter on the device, so that a
captured graph holds no slot and no number. The same channels take part on every rank.

No wait lasts longer than a limit by the device's clock, nor longer than the abort word is 0. The rank then writes its
fault for the host, and no later exchange waits. The first channel counts how long it has waited.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

CHANNELS: Final = 256  # programs of an exchange, at most. Where fewer run at once, all ranks start them in one order
SLOTS: Final = 4
_TRIES: Final = 4096  # between two readings of the clock

# Words of a rank's control block, int64, on the device.
DEAD: Final = 0  # not 0: a wait was given up
LIMIT_NS: Final = 1
WAITED_NS: Final = 2  # for peers, in all
CONTROL_WORDS: Final = 8

CHANNELS_OF = tl.constexpr(CHANNELS)
SLOTS_OF = tl.constexpr(SLOTS)
DEAD_AT = tl.constexpr(DEAD)
_LIMIT_AT = tl.constexpr(LIMIT_NS)
WAITED_AT = tl.constexpr(WAITED_NS)
_TRIES_AT_ONCE = tl.constexpr(_TRIES)


class WaitWords(NamedTuple):
    """Memory that every wait for a peer reads and writes.

    control: int64 [CONTROL_WORDS], on this rank's device. abort, fault: int64, mapped memory of the host: not 0 is to
    stop; the step at which this rank gave up and the peer that it waited for.
    """

    control: torch.Tensor
    abort: torch.Tensor
    fault: torch.Tensor


@triton.jit
def device_ns():
    """Read the device's clock: int64, ns."""
    return tl.extra.cuda.globaltimer().to(tl.int64)


@triton.jit
def store_for_host(pointer, value):
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
def tried(tries, begun, dead, wait_words, step, peer):
    """Count a poll; each _TRIES_AT_ONCE polls check the wait's limit and the abort word. Returns the polls, the time at
    which the wait began, and 1 if it is given up."""
    tries += 1
    if tries % _TRIES_AT_ONCE == 0:
        now = device_ns()
        begun = tl.where(begun == 0, now, begun)
        dead = (tl.load(wait_words.control + DEAD_AT, volatile=True) != 0).to(tl.int32)
        if dead == 0:
            stopped = tl.load(wait_words.abort, volatile=True) != 0
            late = now - begun > tl.load(wait_words.control + _LIMIT_AT, volatile=True)
            if stopped | late:
                dead = 1
                tl.store(wait_words.control + DEAD_AT, tl.full([], 1, tl.int64))
                store_for_host(wait_words.fault + 1, tl.full([], 0, tl.int64) + peer)
                store_for_host(wait_words.fault, step.to(tl.int64))
    return tries, begun, dead


@triton.jit
def wait_for_flag(flag, tag, dead, wait_words, PEER: tl.constexpr):
    """Wait until a peer's flag, int32 in this rank's memory, has reached `tag`: a peer may be a step ahead. What it
    has stored before is then seen. Returns (1 where the wait was given up, ns that it took)."""
    tries = tl.full([], 0, tl.int32)
    begun = tl.full([], 0, tl.int64)
    waited = tl.full([], 0, tl.int64)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen - tag < 0:
        since = device_ns()
        while (seen - tag < 0) & (dead == 0):
            tries, begun, dead = tried(tries, begun, dead, wait_words, tag, PEER)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        waited += device_ns() - since
    return dead, waited


@triton.jit
def count_wait(waited, channel, wait_words):
    """Count the first channel's wait, in ns; it stands for all."""
    if (channel == 0) & (waited != 0):
        tl.atomic_add(wait_words.control + WAITED_AT, waited, sem="relaxed")


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """Memory that ranks write into, by rank: a tensor on this rank's device, or a mapping of a peer's.

    parts: int16 [CHANNELS, SLOTS, ranks, CAPACITY], all −0.0 in bfloat16 before the first step. words: int64 [SLOTS,
    WORDS]. bests: int64 [CHANNELS, SLOTS, ranks, ROW_WORDS]. gather_flags: int32 [ranks, CHANNELS], spread_flags: int32
    [ranks]; all 0. whole: float32, the first rank's.
    """

    parts: tuple[Any, ...]
    words: tuple[Any, ...]
    bests: tuple[Any, ...]
    gather_flags: tuple[Any, ...]
    spread_flags: tuple[Any, ...]
    whole: Any


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of this rank's exchanges, on its device. reduces, gathers, bests: int32 [CHANNELS]. spreads: int32 [1].
    waited: int64 [1], mapped memory of the host: ns of waits for peers so far."""

    reduces: torch.Tensor
    gathers: torch.Tensor
    bests: torch.Tensor
    spreads: torch.Tensor
    wait_words: WaitWords
    waited: torch.Tensor
