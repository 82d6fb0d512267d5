"""What kernels of recurrent mixers share where rows have drafts: the inputs of a run, of which some are replayed.

A *run* is here what a recurrence is given of a row in one F: first the drafts of the F before that S has kept, whose
inputs lie in the row's state slot, then the row's query tokens, its newest token and its drafts. The state behind the
newest token is written, the inputs of the drafts are kept, and what the drafts make of the state is dropped. The places
of a run are counted from 0; what the convolution has kept of tokens before it has places below 0.

Every token of a run goes through the same loop. So its bits are the same as a draft, replayed, or as a token that is
certain.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.recurrent_rows import convolved, newest_tap


@triton.jit
def input_of(
    projected, kept, conv_state, line, slot, source, column, place, again, ok, goes_on, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Inputs of a run, float32, of these columns at these places; zeros where the row begins and before that.

    line: the row's first query token. again: how many tokens are replayed. ok: of those that there are. FIRST, WIDTH:
    where a token's inputs begin in what the first product has given of it, and how much that is. INPUTS: of a token,
    the CHANNELS that are convolved and what comes behind them. MOST: drafts of a row.
    """
    token = line + place - again
    new = tl.load(projected + token * WIDTH + FIRST + column, mask=ok & (place >= again), other=0.0).to(tl.float32)
    is_old = (place >= 0) & (place < again)
    old = tl.load(kept + (slot * MOST + place) * INPUTS + column, mask=ok & is_old, other=0.0)
    before = conv_state + (source * (WINDOW - 1) + WINDOW - 1 + place) * CHANNELS + column
    seen = tl.load(before, mask=ok & (place < 0) & goes_on, other=0.0)
    return tl.where(place >= again, new, tl.where(place >= 0, old, seen))


@triton.jit
def convolved_of(
    projected, kept, conv_state, conv_weight, conv_bias, line, slot, source, channel, step, again, ok, goes_on,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The convolution that ends at place `step`, and its SiLU. The order of the sum is that of `sum_of_kept`."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(WINDOW - 1):
        seen = input_of(
            projected, kept, conv_state, line, slot, source, channel, step - (WINDOW - 1) + tap, again, ok, goes_on,
            FIRST, WIDTH, INPUTS, CHANNELS, WINDOW, MOST,
        )  # fmt: skip
        weight = tl.load(conv_weight + channel * WINDOW + tap, mask=ok, other=0.0)
        total += seen * weight.to(tl.float32)
    newest = input_of(
        projected, kept, conv_state, line, slot, source, channel, step, again, ok, goes_on, FIRST, WIDTH, INPUTS,
        CHANNELS, WINDOW, MOST,
    )  # fmt: skip
    return convolved(total, newest, newest_tap(conv_weight, conv_bias, channel, ok, WINDOW, HAS_BIAS))


@triton.jit
def keep_inputs(
    projected, kept, line, slot, column, count, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    MOST: tl.constexpr, MOST_PAD: tl.constexpr,
):  # fmt: skip
    """These columns of the drafts among the row's `count` query tokens go into its slot. Nobody reads what is there any
    more. MOST_PAD: MOST or more, a power of two."""
    j = tl.arange(0, MOST_PAD)[:, None]
    mine = (j < count - 1) & ok[None, :]
    new = tl.load(projected + (line + 1 + j) * WIDTH + FIRST + column[None, :], mask=mine, other=0.0)
    tl.store(kept + (slot * MOST + j) * INPUTS + column[None, :], new.to(tl.float32), mask=mine)


@triton.jit
def leave_channels(
    projected, kept, conv_state, line, slot, source, copy, channel, again, count, after, ok, goes_on,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, MOST_PAD: tl.constexpr, KEPT: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """What the convolution will see again behind the newest token, and in a snapshot behind the `after` first tokens of
    the run; and the inputs of the drafts. KEPT: WINDOW - 1 or more, a power of two."""
    tap = tl.arange(0, KEPT)[:, None]
    at = channel[None, :]
    there = (tap < WINDOW - 1) & ok[None, :]
    seen = input_of(
        projected, kept, conv_state, line, slot, source, at, again - (WINDOW - 2) + tap, again, there, goes_on, FIRST,
        WIDTH, INPUTS, CHANNELS, WINDOW, MOST,
    )  # fmt: skip
    if SNAPSHOTS:
        copied = there & (copy >= 0)
        seen_there = input_of(
            projected, kept, conv_state, line, slot, source, at, after - (WINDOW - 1) + tap, again, copied, goes_on,
            FIRST, WIDTH, INPUTS, CHANNELS, WINDOW, MOST,
        )  # fmt: skip
    tl.debug_barrier()  # what is written here is read by other threads
    tl.store(conv_state + (slot * (WINDOW - 1) + tap) * CHANNELS + at, seen, mask=there)
    if SNAPSHOTS:
        tl.store(conv_state + (copy * (WINDOW - 1) + tap) * CHANNELS + at, seen_there, mask=copied)
    keep_inputs(projected, kept, line, slot, channel, count, ok, FIRST, WIDTH, INPUTS, MOST, MOST_PAD)


def places_of(batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    """What kernels are given of a batch's states, int32 [B] each: slots, read_from, copied_to, copied_after, replayed.
    Without snapshots the second to the fourth are not read."""
    own, snapshots = batch.state_slots, batch.states_read_from is not None
    assert own is not None, "a model that keeps states is given a batch that names no state slots"
    assert batch.replayed is not None, "slots that hold inputs of drafts are given a batch that names no replays"
    assert not snapshots or batch.copied_after is not None, "a border may be inside a run"
    others = (batch.states_read_from, batch.states_copied_to, batch.copied_after)
    return (own, *(own if one is None else one for one in others), batch.replayed)
