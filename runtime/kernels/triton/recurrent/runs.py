"""What kernels of recurrent mixers share for rows that decode: the tokens of a run, and a convolution over them.

A *run* is a row's tokens in one F: first the drafts that S has accepted, whose inputs the F before has kept in the
row's state slot, then the query tokens: the newest token and its drafts. The state behind the newest token is written,
the inputs of the drafts are kept, and their states are dropped. Places of a run count from 0.

Every token goes through the same loop, so its bits are the same as a draft, replayed, or certain. MOST is the number of
drafts that a slot has room for. With 0, a run is one token: the compiler removes the loop and everything about drafts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.recurrent.rows import StateRows, row_of


@triton.jit
def run_of(row, queries, rows, MOST: tl.constexpr, SNAPSHOTS: tl.constexpr):
    """`row_of` a row that decodes, which is live with up to `queries` query tokens. Behind it: the tokens that are
    replayed, the tokens behind which its state is copied, and the tokens of the run."""
    start, count, slot, source, copy, live, goes_on = row_of(row, rows, SNAPSHOTS)
    live = live & (count <= queries)
    again, after, tokens = 0, 1, 1
    if MOST > 0:
        again = tl.load(rows.replayed + row, mask=live, other=0)
        after, tokens = again, again + count
        if SNAPSHOTS:
            after = tl.load(rows.copied_after + row, mask=live, other=0)
    return start, count, slot, source, copy, live, goes_on & live, again, after, tokens


@triton.jit
def input_of(
    projected, kept, line, slot, column, index, again, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Inputs of a run at a place of it, float32, of these columns.

    line: the row's first query token. again: the number of replayed tokens. ok: mask of existing tokens. FIRST, WIDTH:
    where a token's inputs begin in what the first product has given of it, and how much that is. INPUTS: of a token,
    the channels that are convolved and what comes behind them. MOST: drafts of a row.
    """
    token = projected + (line + index - again) * WIDTH + FIRST
    found = tl.load(token + column, mask=ok & (index >= again), other=0.0).to(tl.float32)
    if MOST > 0:
        old = tl.load(kept + (slot * MOST + index) * INPUTS + column, mask=ok & (index < again), other=0.0)
        found = tl.where(index >= again, found, old)
    return found


@triton.jit
def window_of(conv_state, source, channel, ok, CHANNELS: tl.constexpr, WINDOW: tl.constexpr):
    """The window of a convolution before a run, of these channels: the last WINDOW - 1 inputs, oldest first; the inputs
    that the row's slot will have; the inputs that a snapshot will have. Three tuples of tensors as `channel`, which are
    equal here. ok: of channels that there are, and of a row that goes on."""
    seen = ()
    for tap in tl.static_range(WINDOW - 1):
        at = conv_state + (source * (WINDOW - 1) + tap) * CHANNELS + channel
        seen = longer(seen, tl.load(at, mask=ok, other=0.0))
    return seen, seen, seen


@triton.jit
def taps_of(conv_weight, conv_bias, channel, ok, WINDOW: tl.constexpr):
    """By what a convolution multiplies what it sees, the oldest first, and behind that its bias: a tuple, float32, as
    `channel`."""
    taps = ()
    for tap in tl.static_range(WINDOW):
        weight = tl.load(conv_weight + channel * WINDOW + tap, mask=ok, other=0.0)
        taps = longer(taps, weight.to(tl.float32))
    bias = tl.zeros(channel.shape, tl.float32)
    if conv_bias is not None:
        bias = tl.load(conv_bias + channel, mask=ok, other=0.0).to(tl.float32)
    return longer(taps, bias)


@triton.jit
def convolved_of(window, newest, taps, WINDOW: tl.constexpr):
    """The convolution that ends at `newest`, oldest first, then the bias, and its SiLU."""
    total, seen = tl.zeros(newest.shape, tl.float32), window[0]
    for tap in tl.static_range(WINDOW - 1):
        total += seen[tap] * taps[tap]
    total += newest * taps[WINDOW - 1]
    total += taps[WINDOW]
    return total * logistic(total)


@triton.jit
def moved_window(window, newest, is_certain, is_boundary, WINDOW: tl.constexpr, SNAPSHOTS: tl.constexpr):
    """The window one token further. is_certain: the row's slot will have it. is_boundary: a snapshot will."""
    before, left, there = window
    seen, certain, at_boundary = (), (), ()
    for tap in tl.static_range(WINDOW - 1):
        seen = longer(seen, before[tap + 1] if tap < WINDOW - 2 else newest)
        certain = longer(certain, tl.where(is_certain, seen[tap], left[tap]))
        if SNAPSHOTS:
            at_boundary = longer(at_boundary, tl.where(is_boundary, seen[tap], there[tap]))
    return seen, certain, at_boundary if SNAPSHOTS else there


@triton.jit
def leave_window(
    conv_state, slot, copy, channel, window, ok, CHANNELS: tl.constexpr, WINDOW: tl.constexpr, SNAPSHOTS: tl.constexpr
):  # fmt: skip
    """Store what the row's slot will have, and what a snapshot will. copy: below 0, there is none."""
    _, left, there = window
    for tap in tl.static_range(WINDOW - 1):
        tl.store(conv_state + (slot * (WINDOW - 1) + tap) * CHANNELS + channel, left[tap], mask=ok)
        if SNAPSHOTS:
            at = conv_state + (copy * (WINDOW - 1) + tap) * CHANNELS + channel
            tl.store(at, there[tap], mask=ok & (copy >= 0))


@triton.jit
def drafts_of(
    projected, line, column, count, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, MOST_PAD: tl.constexpr
):  # fmt: skip
    """These columns of the drafts' inputs among the row's `count` query tokens, [MOST_PAD, columns]. MOST_PAD: the
    most that a row may have, rounded up to a power of two."""
    j = tl.arange(0, MOST_PAD)[:, None]
    mine = (j < count - 1) & ok[None, :]
    return tl.load(projected + (line + 1 + j) * WIDTH + FIRST + column[None, :], mask=mine, other=0.0)


@triton.jit
def keep_drafts(
    kept, slot, column, drafts, count, ok, INPUTS: tl.constexpr, MOST: tl.constexpr, MOST_PAD: tl.constexpr
):  # fmt: skip
    """What `drafts_of` has found goes into the row's slot. Nobody reads what is there any more."""
    j = tl.arange(0, MOST_PAD)[:, None]
    mine = (j < count - 1) & ok[None, :]
    tl.store(kept + (slot * MOST + j) * INPUTS + column[None, :], drafts.to(tl.float32), mask=mine)


def rows_of_runs(batch: ForwardBatch, most: int) -> StateRows:
    """Return the rows that `run_of` reads. most: drafts that a slot has room for."""
    own, snapshots = batch.state_slots, batch.states_read_from is not None
    assert own is not None, "a model that keeps states is given a batch that names no state slots"
    assert batch.decode_queries <= 1 + most, "more drafts than a slot has room for"
    assert not most or batch.replayed is not None, "slots that hold inputs of drafts are given no replays"
    assert not most or not snapshots or batch.copied_after is not None, "a boundary may be inside a run"
    return StateRows(
        batch.query_start_loc, batch.seq_lens, batch.positions, own, batch.states_read_from, batch.states_copied_to,
        batch.copied_after, batch.replayed,
    )  # fmt: skip
