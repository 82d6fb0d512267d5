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
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import squares_of, sum_of_squares
from runahead.runtime.kernels.triton.recurrent.rows import leave_state, step_of
from runahead.runtime.kernels.triton.recurrent.runs import (
    convolved_of,
    drafts_of,
    inputs_of,
    keep_drafts,
    leave_windows,
    moved_windows,
    rows_of_runs,
    run_of,
    run_sizes,
    taps_of,
    windows_of,
)
from runahead.runtime.kernels.triton.recurrent.tiling import STATES, StateTiling

_MOST_OF_A_THREAD: Final = 64  # outputs of one token in a thread that holds two tokens' outputs


@triton.jit
def _inputs_at(
    index, projected, kept, line, slot, columns, masks, replayed, tokens, x_channel, in_head, SIZES: tl.constexpr
):  # fmt: skip
    """`inputs_of` a token, and behind them its gate, 0 for replayed tokens, which have no output."""
    inputs = inputs_of(index, projected, kept, line, slot, columns, masks, replayed, tokens, SIZES)
    gate = projected + (line + index - replayed) * SIZES.WIDTH + x_channel
    ok = in_head & (index < tokens) & (index >= replayed)
    return longer(inputs, tl.load(gate, mask=ok, other=0.0).to(tl.float32))


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
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, TILE: tl.constexpr, STATE_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr, EACH_PAD: tl.constexpr, SIZES: tl.constexpr, SCALED: tl.constexpr, SUMMED: tl.constexpr,
    STRIDE: tl.constexpr, HOLDS_TWO: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute Mamba-2 of rows with up to `queries` query tokens: TILE numbers of a head a program.

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
    SIZE: tl.constexpr = HEADS * HEAD_DIM * STATE  # numbers of a slot
    TILES: tl.constexpr = (HEAD_DIM + TILE - 1) // TILE
    PROGRAMS: tl.constexpr = EACH * TILES  # of a group
    ARRIVES_EARLY: tl.constexpr = SIZES.DRAFTS == 0 and (SCALED and not SUMMED)
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
    start, count, slot, source, copy, live, goes_on, replayed, after, tokens = run_of(row, queries, rows, SIZES)
    of_head = state + (head * HEAD_DIM + dim[:, None]) * STATE + n[None, :]
    in_tile = in_head[:, None] & in_state[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    channels, masks = (x_channel, b_channel, c_channel), (in_head, in_state, in_state)
    windows = windows_of(conv_state, source, channels, masks, goes_on, SIZES)
    taps = taps_of(weights.conv_weight, weights.conv_bias, channels, masks, SIZES)
    slope, straight = tl.load(weights.a + head), tl.load(weights.d + head).to(tl.float32)
    bias = tl.load(weights.dt_bias + head).to(tl.float32)
    if SCALED:
        weight = tl.load(weights.gamma + x_channel, mask=in_head, other=0.0).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    line = start.to(tl.int64)
    if live:
        first = row.to(tl.int64) * queries  # of `made`
        meeting = arrived + row * GROUPS + group
        columns = (x_channel, b_channel, c_channel, SIZES.CHANNELS + head)
        of_columns = (in_head, in_state, in_state, True)
        ahead = _inputs_at(
            0, projected, kept, line, slot, columns, of_columns, replayed, tokens, x_channel, in_head, SIZES
        )
        if ARRIVES_EARLY:
            tl.debug_barrier()
            is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == PROGRAMS - 1
        for step in range(tokens):
            inputs = ahead
            if SIZES.DRAFTS > 0:  # the next token's inputs are loaded before anything waits for this one's
                ahead = _inputs_at(
                    step + 1, projected, kept, line, slot, columns, of_columns, replayed, tokens, x_channel, in_head,
                    SIZES,
                )  # fmt: skip
            x, b, c = convolved_of(windows, inputs, taps, SIZES)
            windows = moved_windows(windows, inputs, step == replayed, step + 1 == after, SIZES)
            dt, z = step_of(inputs[3], bias, low, high), inputs[4]
            state_tile = state_tile * tl.exp(dt * slope) + (x * dt)[:, None] * b[None, :]
            if SIZES.DRAFTS > 0:
                if step == replayed:  # the newest token: what follows is not certain
                    tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
                if SIZES.SNAPSHOTS:
                    if (copy >= 0) & (step + 1 == after):
                        tl.store(of_head + copy * SIZE, state_tile, mask=in_tile)
            if step >= replayed:
                y = tl.sum(state_tile * c[None, :], 1) + straight * x
                y = y * z * logistic(z)
                token = step - replayed
                if not SCALED:
                    tl.store(made + (first + token) * INNER + x_channel, y, mask=in_head)
                else:
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
        if SIZES.DRAFTS == 0:
            # Behind the meeting: it waits until all that was written before it is there for all to see.
            leave_state(of_head, slot, copy, state_tile, in_tile, SIZE, SIZES.SNAPSHOTS)
        else:
            x_drafts = drafts_of(projected, line, (x_channel,), count, (in_head,), SIZES)
        leave_windows(conv_state, slot, copy, (x_channel,), windows[:1], (in_head,), SIZES)
        if is_last:
            tl.store(meeting, 0)
            if SIZES.DRAFTS > 0:
                each = tl.arange(0, EACH_PAD)
                shared_columns = (b_channel, c_channel, SIZES.CHANNELS + group * EACH + each)
                of_shared = (in_state, in_state, each < EACH)
                shared_drafts = drafts_of(projected, line, shared_columns, count, of_shared, SIZES)
            i = tl.arange(0, GROUP_PAD)
            if not SCALED:
                ok = i < SHARE
                at = group * SHARE + i
                own = made + first * INNER + at
                made_next = tl.load(own, mask=ok, other=0.0, cache_modifier=".cg")
                weight = tl.load(weights.gamma + at, mask=ok, other=0.0).to(tl.float32)
            leave_windows(conv_state, slot, copy, channels[1:], windows[1:], masks[1:], SIZES)
            if SIZES.DRAFTS > 0:
                keep_drafts(kept, slot, shared_columns, shared_drafts, count, of_shared, SIZES)
            for token in range(tokens - replayed):
                if not SCALED:
                    value = made_next
                    after_it, more = own + (token + 1) * INNER, token + 1 < count
                    if SIZES.DRAFTS > 0 and HOLDS_TWO:
                        made_next = tl.load(after_it, mask=ok & more, other=0.0, cache_modifier=".cg")
                    scale = tl.rsqrt(sum_of_squares(value) / SHARE + eps)
                    value = (value * scale * weight).to(out.dtype.element_ty)
                    tl.store(out + (line + token) * INNER + at, value, mask=ok)
                    if SIZES.DRAFTS > 0 and not HOLDS_TWO:
                        made_next = tl.load(after_it, mask=ok & more, other=0.0, cache_modifier=".cg")
                if SUMMED:
                    sums = made + (first + token) * PROGRAMS + i
                    found = tl.load(sums, mask=i < PROGRAMS, other=0.0, cache_modifier=".cg")
                    tl.store(squares + line + token, tl.sum(found, 0))
        if SIZES.DRAFTS > 0:
            keep_drafts(kept, slot, (x_channel,), x_drafts, count, (in_head,), SIZES)
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
    """Compute the input of `weights.out` for rows that decode, with up to `batch.decode_queries` query tokens, and
    advance their states to the newest token, in place.

    projected: contiguous [T, inner + channels + heads]. states: float32, of this mixer, [state slots, window - 1,
    channels], [state slots, heads, head_dim, state] and the inputs of up to K drafts, [state slots of rows, K,
    `Kept.inputs`]. Inputs of `batch.replayed` are replayed, then the inputs of the row's new drafts are kept. Slots of
    rows that are masked or have more query tokens are unchanged. out: contiguous [T, inner]; rows with more query
    tokens are not written, masked rows get zeros. arrived: int32 [rows * groups or more], zeros before and after.
    dependent: launched programmatically. squares: float64 [tiles, T or more], gets sums of squares, of a lone row in
    one tile for each program, otherwise in one tile; the reader applies the norm's scale. tiling: of states. Returns
    the number of tiles.
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
        TILE=tile,
        STATE_PAD=triton.next_power_of_2(shape.state),
        GROUP_PAD=group_pad,
        EACH_PAD=triton.next_power_of_2(shape.heads // shape.groups),
        SIZES=run_sizes(shape.inner, weights.conv_weight, shape.heads, most, batch),
        SCALED=scaled,
        SUMMED=summed,
        STRIDE=0 if squares is None else squares.shape[1],
        HOLDS_TWO=group_pad <= _MOST_OF_A_THREAD * 32 * tiling.warps,
        DEPENDENT=dependent,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
    return 1 if summed else programs
