"""Mamba-2 of rows with one query token, in one kernel: convolution, steps, state, output and the norm with its gate.

A program has some numbers of one head, with what the head keeps of them; what B and C are, each finds for itself. The
norm is over all heads of a group: the last program of a group applies it, unless the reader of the result applies it or
its scale, and moves on what the convolution has seen of B and C, which the others have read by then. A row's state is
read and written once. No bit of a row depends on how states are cut: sums of squares have no order (`squares_of`), and
a sum over a state's numbers stays in one warp.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Mamba2
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import squares_of, sum_of_squares
from runahead.runtime.kernels.triton.recurrent.rows import (
    convolved,
    moved_channels,
    newest_tap,
    row_of,
    shift_channels,
    softplus,
    sum_of_kept,
)
from runahead.runtime.kernels.triton.recurrent.tiling import STATES, StateTiling


@triton.jit
def step_of(raw, bias, low, high):
    """How long a head's step is, as the first product and the bias say it."""
    dt = softplus(raw + bias)
    return tl.minimum(tl.maximum(dt, low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)


@triton.jit
def moved_on(state_tile, x, b, dt, slope):
    """A state [numbers of a head, numbers kept of each] one token further."""
    return state_tile * tl.exp(dt * slope) + (x * dt)[:, None] * b[None, :]


@triton.jit
def gated_output(state_tile, c, x, straight, z):
    """What a token reads of a state, before the norm."""
    y = tl.sum(state_tile * c[None, :], 1) + straight * x
    return y * z * logistic(z)


@triton.jit
def _mamba2_row_kernel(
    projected, conv_weight, conv_bias, a, d, dt_bias, gamma, conv_state, state, state_slots, read_from, copied_to,
    seq_lens, positions, query_start_loc, made, out, squares, arrived, low, high, eps, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    STATE_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, KEPT: tl.constexpr,
    NORMED: tl.constexpr, SCALED: tl.constexpr, SUMMED: tl.constexpr, STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One program for TILE numbers of a head of a row. NORMED: the last program of a group applies the norm. SCALED:
    the reader applies the norm's scale, and each program stores its sum of squares; SUMMED: the last one stores their
    sum. Otherwise the reader applies the norm. Programs that need not meet at the end meet earlier, to tell who moves B
    and C on, and have then read all that is written over: it was read before the wait."""
    let_dependents_start(DEPENDENT)
    INNER: tl.constexpr = HEADS * HEAD_DIM
    SHARE: tl.constexpr = INNER // GROUPS
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    WIDTH: tl.constexpr = INNER + CHANNELS + HEADS
    SIZE: tl.constexpr = HEADS * HEAD_DIM * STATE  # numbers of a slot
    TILES: tl.constexpr = (HEAD_DIM + TILE - 1) // TILE
    row, program = tl.program_id(0), tl.program_id(1)
    head = program // TILES
    group = head // (HEADS // GROUPS)
    dim = program % TILES * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE_PAD)
    in_head, in_state = dim < HEAD_DIM, n < STATE
    x_channel = head * HEAD_DIM + dim
    b_channel = INNER + group * STATE + n
    c_channel = b_channel + GROUPS * STATE
    # Lengths, slots and what earlier launches have left are constant until this kernel writes it.
    start, count, slot, source, copy, live, goes_on = row_of(
        row, state_slots, read_from, copied_to, seq_lens, positions, query_start_loc, SNAPSHOTS
    )
    live = live & (count == 1)
    goes_on = goes_on & live
    of_head = state + (head * HEAD_DIM + dim[:, None]) * STATE + n[None, :]
    in_tile = in_head[:, None] & in_state[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    x_sum = sum_of_kept(conv_state, conv_weight, source, x_channel, in_head & goes_on, CHANNELS, WINDOW)
    b_sum = sum_of_kept(conv_state, conv_weight, source, b_channel, in_state & goes_on, CHANNELS, WINDOW)
    c_sum = sum_of_kept(conv_state, conv_weight, source, c_channel, in_state & goes_on, CHANNELS, WINDOW)
    x_tap = newest_tap(conv_weight, conv_bias, x_channel, in_head, WINDOW, HAS_BIAS)
    b_tap = newest_tap(conv_weight, conv_bias, b_channel, in_state, WINDOW, HAS_BIAS)
    c_tap = newest_tap(conv_weight, conv_bias, c_channel, in_state, WINDOW, HAS_BIAS)
    slope, straight = tl.load(a + head), tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    x_later = moved_channels(conv_state, source, x_channel, in_head & goes_on, CHANNELS, WINDOW, KEPT)
    if SCALED:
        weight = tl.load(gamma + x_channel, mask=in_head, other=0.0).to(tl.float32)
    b_later = moved_channels(conv_state, source, b_channel, in_state & goes_on, CHANNELS, WINDOW, KEPT)
    c_later = moved_channels(conv_state, source, c_channel, in_state & goes_on, CHANNELS, WINDOW, KEPT)
    wait_for_predecessors(DEPENDENT)
    line = projected + start.to(tl.int64) * WIDTH
    if live:
        x_new = tl.load(line + INNER + x_channel, mask=in_head, other=0.0).to(tl.float32)
        b_new = tl.load(line + INNER + b_channel, mask=in_state, other=0.0).to(tl.float32)
        c_new = tl.load(line + INNER + c_channel, mask=in_state, other=0.0).to(tl.float32)
        z = tl.load(line + x_channel, mask=in_head, other=0.0).to(tl.float32)
        raw = tl.load(line + INNER + CHANNELS + head).to(tl.float32)
        meeting = arrived + row * GROUPS + group
        LAST: tl.constexpr = HEADS // GROUPS * TILES - 1
        if not (NORMED or SUMMED):
            tl.debug_barrier()
            is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == LAST
        x, b, c = convolved(x_sum, x_new, x_tap), convolved(b_sum, b_new, b_tap), convolved(c_sum, c_new, c_tap)
        state_tile = moved_on(state_tile, x, b, step_of(raw, bias, low, high), slope)
        y = gated_output(state_tile, c, x, straight, z)
        if NORMED:
            tl.store(made + row.to(tl.int64) * INNER + x_channel, y, mask=in_head)
        else:
            result = y
            if SCALED:
                result = y * weight
                mine = tl.sum(tl.where(in_head, squares_of(y), 0.0), 0)
                if SUMMED:
                    tl.store(made + row * (LAST + 1) + program, mine)
                else:
                    tl.store(squares + program * STRIDE + start, mine)
            tl.store(out + start.to(tl.int64) * INNER + x_channel, result.to(out.dtype.element_ty), mask=in_head)
        if NORMED or SUMMED:
            tl.debug_barrier()
            is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == LAST
        # Behind the meeting: it waits until all that was written before it is there for all to see.
        tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
        if SNAPSHOTS:
            tl.store(of_head + copy * SIZE, state_tile, mask=in_tile & (copy >= 0))
        shift_channels(conv_state, slot, copy, x_channel, x_later, x_new, in_head, CHANNELS, WINDOW, KEPT, SNAPSHOTS)
        if is_last:
            tl.store(meeting, 0)
            shift_channels(
                conv_state, slot, copy, b_channel, b_later, b_new, in_state, CHANNELS, WINDOW, KEPT, SNAPSHOTS
            )
            shift_channels(
                conv_state, slot, copy, c_channel, c_later, c_new, in_state, CHANNELS, WINDOW, KEPT, SNAPSHOTS
            )
            if NORMED:
                i = tl.arange(0, GROUP_PAD)
                ok = i < SHARE
                at = group * SHARE + i
                value = tl.load(made + row.to(tl.int64) * INNER + at, mask=ok, other=0.0, cache_modifier=".cg")
                scale = tl.rsqrt(sum_of_squares(value) / SHARE + eps)
                weight = tl.load(gamma + at, mask=ok, other=0.0).to(tl.float32)
                value = (value * scale * weight).to(out.dtype.element_ty)
                tl.store(out + start.to(tl.int64) * INNER + at, value, mask=ok)
            if SUMMED:
                each = tl.arange(0, GROUP_PAD)
                found = tl.load(made + row * (LAST + 1) + each, mask=each <= LAST, other=0.0, cache_modifier=".cg")
                tl.store(squares + start, tl.sum(found, 0))
    elif count == 1:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        tl.store(out + start.to(tl.int64) * INNER + x_channel, nothing, mask=in_head)
        if SCALED:
            tl.store(squares + (0 if SUMMED else program) * STRIDE + start, 0.0)


def mamba2_of_one_token(
    projected: torch.Tensor,
    weights: Mamba2,
    states: tuple[torch.Tensor, ...],
    batch: ForwardBatch,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    dependent: bool,
    normed: bool = True,
    squares: torch.Tensor | None = None,
    tiling: StateTiling = STATES,
) -> int:
    """What `weights.out` reads of rows with one query token, and their states one token further, in place.

    projected: contiguous [T, inner + channels + heads]. states: float32, of this mixer, [state slots, window - 1,
    channels] and [state slots, heads, head_dim, state]; slots of rows that are masked or have another number of query
    tokens stay as they are. out: contiguous [T, inner]; rows of several query tokens are not written, and of masked
    rows it is zeros. arrived: int32 [rows * groups or more], zeros, which it is again afterwards. dependent: launched
    programmatically. normed: or else without the norm, which is left to the reader. squares: float64 [tiles, T or
    more]: only the norm's scale is left to the reader, and sums of squares are stored here, of a lone row in one tile
    for each program, otherwise in one tile. tiling: how states are cut. Returns the number of tiles.
    """
    assert batch.state_slots is not None, "a model that keeps states is given a batch that names no state slots"
    shape, rows = weights.shape, batch.num_rows
    conv_state, state = states
    tile = tiling.tile(shape.head_dim, shape.state)
    low, high = weights.dt_limits
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    programs, scaled = shape.heads * triton.cdiv(shape.head_dim, tile), squares is not None
    normed, summed = normed and not scaled, scaled and (rows > 1 or not batch.is_decode)
    met = torch.float64 if summed else torch.float32
    between = programs if summed else shape.inner
    assert not scaled or shape.groups == 1
    _mamba2_row_kernel[(rows, programs)](
        projected,
        weights.conv_weight,
        weights.conv_weight if weights.conv_bias is None else weights.conv_bias,
        weights.a,
        weights.d,
        weights.dt_bias,
        weights.gated_norm.weight,
        conv_state,
        state,
        batch.state_slots,
        batch.state_slots if batch.states_read_from is None else batch.states_read_from,
        batch.state_slots if batch.states_copied_to is None else batch.states_copied_to,
        batch.seq_lens,
        batch.positions,
        batch.query_start_loc,
        torch.empty((rows, between), dtype=met, device=projected.device) if normed or summed else out,
        out,
        out if squares is None else squares,
        arrived,
        low,
        high,
        weights.gated_norm.eps,
        HEADS=shape.heads,
        HEAD_DIM=shape.head_dim,
        GROUPS=shape.groups,
        STATE=shape.state,
        WINDOW=shape.window,
        TILE=tile,
        KEPT=triton.next_power_of_2(shape.window - 1),
        STATE_PAD=triton.next_power_of_2(shape.state),
        GROUP_PAD=triton.next_power_of_2(between // shape.groups),
        HAS_BIAS=weights.conv_bias is not None,
        NORMED=normed,
        SCALED=scaled,
        SUMMED=summed,
        STRIDE=0 if squares is None else squares.shape[1],
        DEPENDENT=dependent,
        SNAPSHOTS=batch.states_read_from is not None,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        **options,
    )
    return 1 if summed else programs
