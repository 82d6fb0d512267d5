"""What kernels of recurrent mixers share: whose turn a row is, a convolution over its last tokens, and its state slot.

A row's state lies in its slot and stays there: who computes a row reads it and writes it in place, once a launch. A row
that is masked, padding, or none of the kernel's is neither read nor written. A row whose first query token is at
position 0 begins in this launch: it reads zeros, whatever its slot holds, and nothing of the host's zeroes a slot. One
that begins behind a cached prefix reads a snapshot, which is another slot, and one that reaches a boundary leaves its
state in a snapshot too.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.triton.ops.gates import logistic


@triton.jit
def row_of(
    row, state_slots, read_from, copied_to, seq_lens, positions, query_start_loc, SNAPSHOTS: tl.constexpr
):  # fmt: skip
    """A row's first query token, how many it has, its state slot, the slot that it goes on from, the one in which its
    state is left too, below 0 if there is none, whether the row is live, and whether it goes on at all or begins with
    zeros. Of a row that is not live the slots are 0, 0 and -1, and it does not go on."""
    start = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - start
    live = (tl.load(seq_lens + row) > 0) & (count > 0)
    slot = tl.load(state_slots + row, mask=live, other=0).to(tl.int64)
    source = slot
    copy = -1 + 0 * slot
    if SNAPSHOTS:
        source = tl.load(read_from + row, mask=live, other=0).to(tl.int64)
        copy = tl.load(copied_to + row, mask=live, other=-1).to(tl.int64)
    goes_on = tl.load(positions + start, mask=live, other=0) > 0
    return start, count, slot, source, copy, live, goes_on


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which no x overflows. Where exp(x) is small, 1 + exp(x) has lost its last bits: what it was
    rounded by is put right by the quotient.

    Source: Kahan's log1p, in Higham, "Accuracy and Stability of Numerical Algorithms", second edition, section 1.14.
    """
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    lost = above == 1.0
    log = tl.where(lost, small, tl.log(above) * (small / tl.where(lost, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def sum_of_kept(conv_state, conv_weight, source, channel, ok, CHANNELS: tl.constexpr, WINDOW: tl.constexpr):
    """What the tokens before add to a convolution of one token, oldest first. ok: of channels that there are, and of a
    row that goes on. Float32, as `channel`."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WINDOW - 1):
        seen = tl.load(conv_state + (source * (WINDOW - 1) + tap) * CHANNELS + channel, mask=ok, other=0.0)
        weight = tl.load(conv_weight + channel * WINDOW + tap, mask=ok, other=0.0)
        total += seen * weight.to(tl.float32)
    return total


@triton.jit
def newest_tap(conv_weight, conv_bias, channel, ok, WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr):
    """By what a convolution multiplies the token itself, and its bias, 0 if it has none: float32, as `channel`."""
    weight = tl.load(conv_weight + channel * WINDOW + WINDOW - 1, mask=ok, other=0.0).to(tl.float32)
    bias = tl.zeros(channel.shape, tl.float32)
    if HAS_BIAS:
        bias = tl.load(conv_bias + channel, mask=ok, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def convolved(total, newest, tap):
    """SiLU of the whole sum: `total` of the tokens before, then the token itself, then the bias."""
    weight, bias = tap
    total += newest * weight
    total += bias
    return total * logistic(total)


@triton.jit
def moved_channels(
    conv_state, source, channel, ok, CHANNELS: tl.constexpr, WINDOW: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """What a convolution keeps, each in the place of the one before it: [KEPT, channels], without the newest. ok: of
    channels that there are, and of a row that goes on. KEPT: WINDOW - 1 or more, a power of two."""
    tap = tl.arange(0, KEPT)[:, None]
    seen = conv_state + (source * (WINDOW - 1) + tap + 1) * CHANNELS + channel[None, :]
    return tl.load(seen, mask=(tap < WINDOW - 2) & ok[None, :], other=0.0)


@triton.jit
def shift_channels(
    conv_state, slot, copy, channel, later, newest, ok, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
    KEPT: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One token further: the oldest goes, the newest comes. later: `moved_channels`. Whoever reads what is written over
    here has done so: a program's own threads have had a barrier since, others' have met."""
    tap = tl.arange(0, KEPT)[:, None]
    later = tl.where(tap == WINDOW - 2, newest[None, :], later)
    there = (tap < WINDOW - 1) & ok[None, :]
    tl.store(conv_state + (slot * (WINDOW - 1) + tap) * CHANNELS + channel[None, :], later, mask=there)
    if SNAPSHOTS:
        copy_at = conv_state + (copy * (WINDOW - 1) + tap) * CHANNELS + channel[None, :]
        tl.store(copy_at, later, mask=there & (copy >= 0))
