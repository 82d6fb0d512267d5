"""Mamba-2 of rows with several query tokens: by products of matrices within a sub-chunk, from one to the next by the
state.

A program has some numbers of one head of a row, goes through the row's sub-chunks and holds the state meanwhile. Within
a sub-chunk, with s the running sum of dt * a, what token j adds to token i is exp(s_i - s_j) * dt_j * (C_i B_j) * x_j.

Source: Dao and Gu, 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
Space Duality", section 6.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import Mamba2
from runahead.runtime.kernels.triton.recurrent.rows import leave_state, row_of, step_of
from runahead.runtime.kernels.triton.recurrent.scan import (
    ChunkRows,
    convolve,
    gated_norm,
    keep_channels,
    stages_of_scans,
)

_STATE_WORDS: Final = 8192  # float32 numbers of a state that a program holds, at most
_LEAST_SIDE: Final = 16  # of a matrix that the matrix units take


@triton.jit
def _mamba2_scan_kernel(
    projected, convolved, a, d, dt_bias, state, rows, y, low, high, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, STATE_PAD: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """Compute Mamba-2 of a row's sub-chunks in turn: TILE numbers of a head a program.

    convolved: [T, channels]. state: float32 [state slots, HEADS, HEAD_DIM, STATE]. y: [T, HEADS * HEAD_DIM].
    """
    INNER: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    WIDTH: tl.constexpr = INNER + CHANNELS + HEADS
    SIZE: tl.constexpr = HEADS * HEAD_DIM * STATE  # numbers of a slot
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE_PAD)
    r = tl.arange(0, LENGTH)
    in_head, in_state = dim < HEAD_DIM, n < STATE
    start, count, slot, source, copy, live, goes_on = row_of(tl.program_id(0), rows, SNAPSHOTS)
    if live & (count > 1):
        before = (tl.load(rows.positions + start) % LENGTH).to(tl.int32)  # tokens of other chunks
        of_head = state + (head * HEAD_DIM + dim[:, None]) * STATE + n[None, :]
        in_tile = in_head[:, None] & in_state[None, :]
        state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
        slope = tl.load(a + head)
        straight = tl.load(d + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
        for part in range((before + count + LENGTH - 1) // LENGTH):
            i = part * LENGTH - before + r
            ours = (i >= 0) & (i < count)
            token = (start + i).to(tl.int64)
            dt = tl.load(projected + token * WIDTH + INNER + CHANNELS + head, mask=ours, other=0.0).to(tl.float32)
            dt = tl.where(ours, step_of(dt, bias, low, high), 0.0)
            total = tl.cumsum(dt * slope, 0)
            line = convolved + token[:, None] * CHANNELS
            x_at = line + head * HEAD_DIM + dim[None, :]
            x = tl.load(x_at, mask=ours[:, None] & in_head[None, :], other=0.0)
            b_at = line + INNER + group * STATE + n[None, :]
            seen = ours[:, None] & in_state[None, :]
            b = tl.load(b_at, mask=seen, other=0.0)
            c = tl.load(b_at + GROUPS * STATE, mask=seen, other=0.0)
            later = tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf"))
            weights = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(later) * dt[None, :]
            found = tl.dot(c, tl.trans(state_tile).to(c.dtype), input_precision="ieee") * tl.exp(total)[:, None]
            found = tl.dot(weights.to(x.dtype), x, found, input_precision="ieee")
            found += straight * x.to(tl.float32)
            at = y + token[:, None] * INNER + head * HEAD_DIM + dim[None, :]
            tl.store(at, found.to(y.dtype.element_ty), mask=ours[:, None] & in_head[None, :])
            end = tl.sum(tl.where(r == LENGTH - 1, total, 0.0), 0)
            added = (x.to(tl.float32) * (tl.exp(end - total) * dt)[:, None]).to(x.dtype)
            state_tile = tl.dot(tl.trans(added), b, state_tile * tl.exp(end), input_precision="ieee")
        leave_state(of_head, slot, copy, state_tile, in_tile, SIZE, SNAPSHOTS)


def mamba2_of_chunks(
    projected: torch.Tensor,
    weights: Mamba2,
    states: tuple[torch.Tensor, ...],
    rows: ChunkRows,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the input of `weights.out`, [T, inner], for rows with several query tokens, and advance their states by
    these tokens, in place.

    projected, states: see `mamba2_of_decode_rows`; slots of rows that are masked or have one query token are unchanged,
    and the result for their tokens and for padding is zeros. squares: see `gated_norm`.
    """
    shape, batch = weights.shape, rows.batch
    conv_state, state = states
    convolved = convolve(projected, weights.conv_weight, weights.conv_bias, conv_state, rows, shape.inner)
    keep_channels(projected, conv_state, rows, shape.inner)
    state_pad = max(triton.next_power_of_2(shape.state), _LEAST_SIDE)
    tile = max(min(triton.next_power_of_2(shape.head_dim), _STATE_WORDS // state_pad), _LEAST_SIDE)
    low, high = weights.dt_limits
    y = projected.new_empty((projected.shape[0], shape.inner))
    _mamba2_scan_kernel[(batch.num_rows, shape.heads, triton.cdiv(shape.head_dim, tile))](
        projected,
        convolved,
        weights.a,
        weights.d,
        weights.dt_bias,
        state,
        rows.states,
        y,
        low,
        high,
        HEADS=shape.heads,
        HEAD_DIM=shape.head_dim,
        GROUPS=shape.groups,
        STATE=shape.state,
        LENGTH=rows.length,
        TILE=tile,
        STATE_PAD=state_pad,
        SNAPSHOTS=rows.snapshots,
        num_warps=4,
        num_stages=stages_of_scans(),
    )
    norm = weights.gated_norm
    return gated_norm(projected, y, norm.weight, norm.eps, rows, shape.groups, gate_first=True, squares=squares)
