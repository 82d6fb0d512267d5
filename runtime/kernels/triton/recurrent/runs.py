"""Device functions of recurrent mixers for rows that decode: the tokens of a run, and a convolution over them.

A *run* is a row's tokens in one F: first the drafts that S has accepted, whose inputs the previous F has kept in
the row's state slot, then the query tokens: the newest token and its drafts. The state behind the newest token is
written, the inputs of the drafts are kept, and their states are dropped. Places of a run count from 0.

Every token goes through the same loop, so its bits are the same as a draft, replayed, or certain. With no room for
drafts, a run is one token: the compiler removes the loop and everything about drafts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disable-error-code="assignment"
# (a kernel's pointers have no Python type, and its tuples grow)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.recurrent.rows import StateRows, row_of


class RunSizes(NamedTuple):
    """Constants of a mixer's decode kernel."""

    FIRST: int  # column of a token's inputs in the first product's result, behind its gate
    WIDTH: int  # columns of this result
    INPUTS: int  # of a token: the convolution's channels, then its step's numbers
    CHANNELS: int  # of the convolution
    WINDOW: int  # tokens of the convolution
    DRAFTS: int  # drafts that a slot has room for
    DRAFTS_PAD: int  # a power of two
    SNAPSHOTS: bool  # rows may begin with a snapshot and leave one


def run_sizes(first: int, conv_weight: torch.Tensor, step_inputs: int, most: int, batch: ForwardBatch) -> RunSizes:
    """Return the constants. first: see `RunSizes`. conv_weight: [channels, 1, window]. step_inputs: numbers of a token
    behind its channels. most: drafts that a slot has room for."""
    channels, _, window = conv_weight.shape
    inputs = channels + step_inputs
    pad = triton.next_power_of_2(max(most, 1))
    return RunSizes(first, first + inputs, inputs, channels, window, most, pad, batch.states_read_from is not None)


@triton.jit
def run_of(row, queries, rows, SIZES: tl.constexpr):
    """`row_of` a row that decodes, which is live with up to `queries` query tokens. Behind it: the tokens that are
    replayed, the tokens behind which its state is copied, and the tokens of the run."""
    start, count, slot, source, copy, live, goes_on = row_of(row, rows, SIZES.SNAPSHOTS)
    live = live & (count <= queries)
    replayed, after, tokens = 0, 1, 1
    if SIZES.DRAFTS > 0:
        replayed = tl.load(rows.replayed + row, mask=live, other=0)
        after, tokens = replayed, replayed + count
        if SIZES.SNAPSHOTS:
            after = tl.load(rows.copied_after + row, mask=live, other=0)
    return start, count, slot, source, copy, live, goes_on & live, replayed, after, tokens


@triton.jit
def inputs_of(index, projected, kept, line, slot, columns, masks, replayed, tokens, SIZES: tl.constexpr):
    """Load a token's inputs: for each tensor of `columns` one of its shape, float32.

    index: the token's index in the run; from `tokens` on, all is 0. line: the row's first query token. columns: tuple
    of int tensors, among the INPUTS of a token. masks: of existing columns. replayed: the number of replayed tokens.
    """
    inputs = ()
    for i in tl.static_range(len(columns)):
        ok = masks[i] & (index < tokens)
        token = projected + (line + index - replayed) * SIZES.WIDTH + SIZES.FIRST
        found = tl.load(token + columns[i], mask=ok & (index >= replayed), other=0.0).to(tl.float32)
        if SIZES.DRAFTS > 0:
            is_kept = ok & (index < replayed)
            old = tl.load(kept + (slot * SIZES.DRAFTS + index) * SIZES.INPUTS + columns[i], mask=is_kept, other=0.0)
            found = tl.where(index >= replayed, found, old)
        inputs += (found,)
    return inputs


@triton.jit
def windows_of(conv_state, source, channels, masks, goes_on, SIZES: tl.constexpr):
    """Load the windows of a convolution before a run: the last WINDOW - 1 inputs, oldest first.

    channels: tuple of int tensors. masks: of existing channels. goes_on: whether the row has earlier tokens. Returns
    for each tensor of `channels` three tuples of tensors of its shape, which are equal here: the window, the window
    that the row's slot will have, and the window that a snapshot will have.
    """
    WINDOW: tl.constexpr = SIZES.WINDOW
    windows = ()
    for i in tl.static_range(len(channels)):
        ok, seen = masks[i] & goes_on, ()
        for tap in tl.static_range(WINDOW - 1):
            at = conv_state + (source * (WINDOW - 1) + tap) * SIZES.CHANNELS + channels[i]
            seen += (tl.load(at, mask=ok, other=0.0),)
        windows += ((seen, seen, seen),)
    return windows


@triton.jit
def taps_of(conv_weight, conv_bias, channels, masks, SIZES: tl.constexpr):
    """Load the convolution's weights: for each tensor of `channels` a tuple of tensors of its shape, float32, the
    oldest token's first, and behind them the bias."""
    WINDOW: tl.constexpr = SIZES.WINDOW
    of_all = ()
    for i in tl.static_range(len(channels)):
        taps = ()
        for tap in tl.static_range(WINDOW):
            weight = tl.load(conv_weight + channels[i] * WINDOW + tap, mask=masks[i], other=0.0)
            taps += (weight.to(tl.float32),)
        bias = tl.zeros(channels[i].shape, tl.float32)
        if conv_bias is not None:
            bias = tl.load(conv_bias + channels[i], mask=masks[i], other=0.0).to(tl.float32)
        taps += (bias,)
        of_all += (taps,)
    return of_all


@triton.jit
def convolved_of(windows, newest, taps, SIZES: tl.constexpr):
    """Convolve up to the newest token, oldest first, then the bias, and apply SiLU: for each window a tensor.

    newest: begins with the newest inputs of these channels.
    """
    WINDOW: tl.constexpr = SIZES.WINDOW
    convolved = ()
    for i in tl.static_range(len(windows)):
        total, seen = tl.zeros(newest[i].shape, tl.float32), windows[i][0]
        for tap in tl.static_range(WINDOW - 1):
            total += seen[tap] * taps[i][tap]
        total += newest[i] * taps[i][WINDOW - 1]
        total += taps[i][WINDOW]
        convolved += (total * logistic(total),)
    return convolved


@triton.jit
def moved_windows(windows, newest, is_certain, is_boundary, SIZES: tl.constexpr):
    """The windows one token further. is_certain: the row's slot will have them. is_boundary: a snapshot will."""
    WINDOW: tl.constexpr = SIZES.WINDOW
    moved = ()
    for i in tl.static_range(len(windows)):
        before, left, there = windows[i]
        seen, certain, at_boundary = (), (), ()
        for tap in tl.static_range(WINDOW - 1):
            seen += (before[tap + 1] if tap < WINDOW - 2 else newest[i],)
            certain += (tl.where(is_certain, seen[tap], left[tap]),)
            if SIZES.SNAPSHOTS:
                at_boundary += (tl.where(is_boundary, seen[tap], there[tap]),)
        moved += ((seen, certain, at_boundary if SIZES.SNAPSHOTS else there),)
    return moved


@triton.jit
def leave_windows(conv_state, slot, copy, channels, windows, masks, SIZES: tl.constexpr):
    """Store what the row's slot will have, and what a snapshot will. copy: the snapshot's slot; below 0: none."""
    WINDOW: tl.constexpr = SIZES.WINDOW
    for i in tl.static_range(len(channels)):
        _, left, there = windows[i]
        for tap in tl.static_range(WINDOW - 1):
            at = conv_state + (slot * (WINDOW - 1) + tap) * SIZES.CHANNELS + channels[i]
            tl.store(at, left[tap], mask=masks[i])
            if SIZES.SNAPSHOTS:
                at = conv_state + (copy * (WINDOW - 1) + tap) * SIZES.CHANNELS + channels[i]
                tl.store(at, there[tap], mask=masks[i] & (copy >= 0))


@triton.jit
def drafts_of(projected, line, columns, count, masks, SIZES: tl.constexpr):
    """Load the inputs of the drafts among the row's `count` query tokens: for each tensor of `columns` [DRAFTS_PAD,
    columns]."""
    drafts = ()
    j = tl.arange(0, SIZES.DRAFTS_PAD)[:, None]
    for i in tl.static_range(len(columns)):
        ok = (j < count - 1) & masks[i][None, :]
        at = projected + (line + 1 + j) * SIZES.WIDTH + SIZES.FIRST + columns[i][None, :]
        drafts += (tl.load(at, mask=ok, other=0.0),)
    return drafts


@triton.jit
def keep_drafts(kept, slot, columns, drafts, count, masks, SIZES: tl.constexpr):
    """Store what `drafts_of` has loaded into the row's slot, whose earlier drafts nobody reads any more."""
    j = tl.arange(0, SIZES.DRAFTS_PAD)[:, None]
    for i in tl.static_range(len(columns)):
        ok = (j < count - 1) & masks[i][None, :]
        at = kept + (slot * SIZES.DRAFTS + j) * SIZES.INPUTS + columns[i][None, :]
        tl.store(at, drafts[i].to(tl.float32), mask=ok)


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
