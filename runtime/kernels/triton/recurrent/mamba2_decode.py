"""Mamba-2 of rows that decode, in one kernel: convolution, steps, state, output and the norm with its gate.

A row has its newest token, before it the drafts that are replayed, and behind it new drafts; without room for drafts a
run is one token (`runs.py`). A program has some numbers of one head, with the state of each; what B and C are, each
finds for itself. A row's state is read and written once, behind its newest token. The norm is over all heads of a
group: the last program of a group applies it, unless the reader of the result applies it or its scale. It also moves on
the convolution's window of B and C and keeps their inputs, which the others have read by then. No bit of a row depends
on how states are cut: sums of squares have no order (`squares_of`), and a sum over a state's numbers stays in one warp.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Mamba2
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import squares_of, sum_of_squares
from runahead.runtime.kernels.triton.recurrent.rows import step_of
from runahead.runtime.kernels.triton.recurrent.runs import (
    convolved_of,
    drafts_of,
    input_of,
    keep_drafts,
    leave_window,
    moved_window,
    rows_of_runs,
    run_of,
    taps_of,
    window_of,
)
from runahead.runtime.kernels.triton.recurrent.tiling import STATES, StateTiling

_MOST_OF_A_THREAD: Final = 64  # outputs of one token in a thread that holds two tokens' outputs


@triton.jit
def _inputs_at(
    index, projected, kept, line, slot, x_channel, b_channel, c_channel, head, again, tokens, in_head, in_state,
    INNER: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, CHANNELS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """What a token brings, float32: x, B, C, how long its step is before the bias, and its gate, 0 for tokens that
    are replayed, which have no output. tokens: of the run, from where all is 0."""
    more = index < tokens
    x = input_of(projected, kept, line, slot, x_channel, index, again, in_head & more, INNER, WIDTH, INPUTS, MOST)
    b = input_of(projected, kept, line, slot, b_channel, index, again, in_state & more, INNER, WIDTH, INPUTS, MOST)
    c = input_of(projected, kept, line, slot, c_channel, index, again, in_state & more, INNER, WIDTH, INPUTS, MOST)
    raw = input_of(projected, kept, line, slot, CHANNELS + head, index, again, more, INNER, WIDTH, INPUTS, MOST)
    gate = projected + (line + index - again) * WIDTH + x_channel
    return x, b, c, raw, tl.load(gate, mask=in_head & more & (index >= again), other=0.0).to(tl.float32)


class _Weights(NamedTuple):
    """The tensors of a `Mamba2`."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    gamma: torch.Tensor  # of the gated norm


@triton.jit(do_not_specialize=["queries"])
def _mamba2_decode_kernel(
    projected, weights, states, rows, made, out, squares, arrived, low, high, eps, queries, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr,
    TILE: tl.constexpr, STATE_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, EACH_PAD: tl.constexpr,
    MOST_PAD: tl.constexpr, SCALED: tl.constexpr, SUMMED: tl.constexpr, STRIDE: tl.constexpr, HOLDS_TWO: tl.constexpr,
    DEPENDENT: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One program for TILE numbers of a head of a row with up to `queries` query tokens.

    SCALED: the reader applies the norm's scale, and each program stores its sums of squares; SUMMED: the last one
    stores their sum. Otherwise the last program of a group applies the norm; HOLDS_TWO: registers can hold the group's
    outputs of two tokens. With one token and nothing for the last program to add, the last one is found early: all that
    is written over was read before the wait.
    """
    let_dependents_start(DEPENDENT)
    conv_state, state, kept = states
    INNER: tl.constexpr = HEADS * HEAD_DIM
    SHARE: tl.constexpr = INNER // GROUPS
    EACH: tl.constexpr = HEADS // GROUPS
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    INPUTS: tl.constexpr = CHANNELS + HEADS
    WIDTH: tl.constexpr = INNER + INPUTS
    SIZE: tl.constexpr = HEADS * HEAD_DIM * STATE  # numbers of a slot
    TILES: tl.constexpr = (HEAD_DIM + TILE - 1) // TILE
    PROGRAMS: tl.constexpr = EACH * TILES  # of a group
    ARRIVES_EARLY: tl.constexpr = MOST == 0 and (SCALED and not SUMMED)
    row, program = tl.program_id(0), tl.program_id(1)
    head = program // TILES
    group = head // EACH
    dim = program % TILES * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE_PAD)
    in_head, in_state = dim < HEAD_DIM, n < STATE
    x_channel = head * HEAD_DIM + dim
    b_channel = INNER + group * STATE + n
    c_channel = b_channel + GROUPS * STATE
    # Lengths, slots and what earlier launches have left are constant until this kernel writes it.
    start, count, slot, source, copy, live, goes_on, again, after, tokens = run_of(row, queries, rows, MOST, SNAPSHOTS)
    of_head = state + (head * HEAD_DIM + dim[:, None]) * STATE + n[None, :]
    in_tile = in_head[:, None] & in_state[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    x_window = window_of(conv_state, source, x_channel, in_head & goes_on, CHANNELS, WINDOW)
    b_window = window_of(conv_state, source, b_channel, in_state & goes_on, CHANNELS, WINDOW)
    c_window = window_of(conv_state, source, c_channel, in_state & goes_on, CHANNELS, WINDOW)
    x_taps = taps_of(weights.conv_weight, weights.conv_bias, x_channel, in_head, WINDOW)
    b_taps = taps_of(weights.conv_weight, weights.conv_bias, b_channel, in_state, WINDOW)
    c_taps = taps_of(weights.conv_weight, weights.conv_bias, c_channel, in_state, WINDOW)
    slope, straight = tl.load(weights.a + head), tl.load(weights.d + head).to(tl.float32)
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    if SCALED:
        weight = tl.load(weights.gamma + x_channel, mask=in_head, other=0.0).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    line = start.to(tl.int64)
    if live:
        first = row.to(tl.int64) * queries  # of `made`
        meeting = arrived + row * GROUPS + group
        ahead = _inputs_at(
            0, projected, kept, line, slot, x_channel, b_channel, c_channel, head, again, tokens, in_head, in_state,
            INNER, WIDTH, INPUTS, CHANNELS, MOST,
        )  # fmt: skip
        if ARRIVES_EARLY:
            tl.debug_barrier()
            is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == PROGRAMS - 1
        for step in range(tokens):
            x_new, b_new, c_new, raw, z = ahead
            if MOST > 0:  # what the next token brings is asked for before anything waits for this one's
                ahead = _inputs_at(
                    step + 1, projected, kept, line, slot, x_channel, b_channel, c_channel, head, again, tokens,
                    in_head, in_state, INNER, WIDTH, INPUTS, CHANNELS, MOST,
                )  # fmt: skip
            x = convolved_of(x_window, x_new, x_taps, WINDOW)
            b = convolved_of(b_window, b_new, b_taps, WINDOW)
            c = convolved_of(c_window, c_new, c_taps, WINDOW)
            x_window = moved_window(x_window, x_new, step == again, step + 1 == after, WINDOW, SNAPSHOTS)
            b_window = moved_window(b_window, b_new, step == again, step + 1 == after, WINDOW, SNAPSHOTS)
            c_window = moved_window(c_window, c_new, step == again, step + 1 == after, WINDOW, SNAPSHOTS)
            dt = step_of(raw, bias, low, high)
            state_tile = state_tile * tl.exp(dt * slope) + (x * dt)[:, None] * b[None, :]
            if MOST > 0:
                if step == again:  # the newest token: what follows is not certain
                    tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
                if SNAPSHOTS:
                    if (copy >= 0) & (step + 1 == after):
                        tl.store(of_head + copy * SIZE, state_tile, mask=in_tile)
            if step >= again:
                y = tl.sum(state_tile * c[None, :], 1) + straight * x
                y = y * z * logistic(z)
                token = step - again
                if not SCALED:
                    tl.store(made + (first + token) * INNER + x_channel, y, mask=in_head)
                else:
                    result = y
                    if SCALED:
                        result = y * weight
                        mine = tl.sum(tl.where(in_head, squares_of(y), 0.0), 0)
                        if SUMMED:
                            tl.store(made + (first + token) * PROGRAMS + program, mine)
                        else:
                            tl.store(squares + program * STRIDE + line + token, mine)
                    at = out + (line + token) * INNER + x_channel
                    tl.store(at, result.to(out.dtype.element_ty), mask=in_head)
        if not ARRIVES_EARLY:
            tl.debug_barrier()
            is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == PROGRAMS - 1
        if MOST == 0:
            # Behind the meeting: it waits until all that was written before it is there for all to see.
            tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
            if SNAPSHOTS:
                tl.store(of_head + copy * SIZE, state_tile, mask=in_tile & (copy >= 0))
        else:
            x_drafts = drafts_of(projected, line, x_channel, count, in_head, INNER, WIDTH, MOST_PAD)
        leave_window(conv_state, slot, copy, x_channel, x_window, in_head, CHANNELS, WINDOW, SNAPSHOTS)
        if is_last:
            tl.store(meeting, 0)
            if MOST > 0:
                each = tl.arange(0, EACH_PAD)
                steps = CHANNELS + group * EACH + each
                b_drafts = drafts_of(projected, line, b_channel, count, in_state, INNER, WIDTH, MOST_PAD)
                c_drafts = drafts_of(projected, line, c_channel, count, in_state, INNER, WIDTH, MOST_PAD)
                step_drafts = drafts_of(projected, line, steps, count, each < EACH, INNER, WIDTH, MOST_PAD)
            i = tl.arange(0, GROUP_PAD)
            if not SCALED:
                ok = i < SHARE
                at = group * SHARE + i
                own = made + first * INNER + at
                made_next = tl.load(own, mask=ok, other=0.0, cache_modifier=".cg")
                weight = tl.load(weights.gamma + at, mask=ok, other=0.0).to(tl.float32)
            leave_window(conv_state, slot, copy, b_channel, b_window, in_state, CHANNELS, WINDOW, SNAPSHOTS)
            leave_window(conv_state, slot, copy, c_channel, c_window, in_state, CHANNELS, WINDOW, SNAPSHOTS)
            if MOST > 0:
                keep_drafts(kept, slot, b_channel, b_drafts, count, in_state, INPUTS, MOST, MOST_PAD)
                keep_drafts(kept, slot, c_channel, c_drafts, count, in_state, INPUTS, MOST, MOST_PAD)
                keep_drafts(kept, slot, steps, step_drafts, count, each < EACH, INPUTS, MOST, MOST_PAD)
            for token in range(tokens - again):
                if not SCALED:
                    value = made_next
                    after_it, more = own + (token + 1) * INNER, token + 1 < count
                    if MOST > 0 and HOLDS_TWO:
                        made_next = tl.load(after_it, mask=ok & more, other=0.0, cache_modifier=".cg")
                    scale = tl.rsqrt(sum_of_squares(value) / SHARE + eps)
                    value = (value * scale * weight).to(out.dtype.element_ty)
                    tl.store(out + (line + token) * INNER + at, value, mask=ok)
                    if MOST > 0 and not HOLDS_TWO:
                        made_next = tl.load(after_it, mask=ok & more, other=0.0, cache_modifier=".cg")
                if SUMMED:
                    sums = made + (first + token) * PROGRAMS + i
                    found = tl.load(sums, mask=i < PROGRAMS, other=0.0, cache_modifier=".cg")
                    tl.store(squares + line + token, tl.sum(found, 0))
        if MOST > 0:
            keep_drafts(kept, slot, x_channel, x_drafts, count, in_head, INPUTS, MOST, MOST_PAD)
    elif count <= queries:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        for token in range(count):
            tl.store(out + (line + token) * INNER + x_channel, nothing, mask=in_head)
            if SCALED:
                tl.store(squares + (0 if SUMMED else program) * STRIDE + line + token, 0.0)


def mamba2_of_decode_rows(
    projected: torch.Tensor,
    weights: Mamba2,
    states: tuple[torch.Tensor, ...],
    batch: ForwardBatch,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    dependent: bool,
    squares: torch.Tensor | None = None,
    tiling: StateTiling = STATES,
) -> int:
    """What `weights.out` reads of rows that decode, which have up to `batch.decode_queries` query tokens, and their
    states as far as their newest tokens, in place.

    projected: contiguous [T, inner + channels + heads]. states: float32, of this mixer, [state slots, window - 1,
    channels], [state slots, heads, head_dim, state] and the inputs of up to K drafts, [state slots of rows, K,
    `Kept.inputs`]: those of `batch.replayed` are replayed, then those of the row's new drafts are kept. Slots of rows
    that are masked or have more query tokens stay as they are. out: contiguous [T, inner]; rows of more query tokens
    are not written, and of masked rows it is zeros. arrived: int32 [rows * groups or more], zeros, which it is again
    afterwards. dependent: launched programmatically.
    squares: float64 [tiles, T or more]: only the norm's scale is left to the reader, and sums of squares are stored
    here, of a lone row in one tile for each program, otherwise in one tile. tiling: how states are cut. Returns the
    number of tiles.
    """
    shape, rows, queries = weights.shape, batch.num_rows, batch.decode_queries
    most = states[2].shape[1]
    tile = tiling.tile(shape.head_dim, shape.state)
    low, high = weights.dt_limits
    programs, scaled = shape.heads * triton.cdiv(shape.head_dim, tile), squares is not None
    summed = scaled and (rows > 1 or not batch.is_decode)
    between = programs if summed else shape.inner
    group_pad = triton.next_power_of_2(between // shape.groups)
    made = out  # where programs leave nothing for the last one
    if summed or not scaled:
        made = out.new_empty((rows * queries, between), dtype=torch.float64 if summed else torch.float32)
    assert not scaled or shape.groups == 1
    assert squares is None or squares.shape[0] >= (1 if summed else programs)
    _mamba2_decode_kernel[(rows, programs)](
        projected,
        _Weights(
            weights.conv_weight, weights.conv_bias, weights.a, weights.d, weights.dt_bias, weights.gated_norm.weight
        ),
        states,
        rows_of_runs(batch, most),
        made,
        out,
        out if squares is None else squares,
        arrived,
        low,
        high,
        weights.gated_norm.eps,
        queries,
        HEADS=shape.heads,
        HEAD_DIM=shape.head_dim,
        GROUPS=shape.groups,
        STATE=shape.state,
        WINDOW=shape.window,
        MOST=most,
        TILE=tile,
        STATE_PAD=triton.next_power_of_2(shape.state),
        GROUP_PAD=group_pad,
        EACH_PAD=triton.next_power_of_2(shape.heads // shape.groups),
        MOST_PAD=triton.next_power_of_2(max(most, 1)),
        SCALED=scaled,
        SUMMED=summed,
        STRIDE=0 if squares is None else squares.shape[1],
        HOLDS_TWO=group_pad <= _MOST_OF_A_THREAD * 32 * tiling.warps,
        DEPENDENT=dependent,
        SNAPSHOTS=batch.states_read_from is not None,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
    return 1 if summed else programs
