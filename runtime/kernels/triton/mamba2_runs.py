"""Mamba-2 of rows that decode where rows may have drafts, in one kernel: what `mamba2_decode` does, for the tokens of a
run one after the other, of which the first are replayed from the inputs in the row's slot.

A row's state is read and written once, behind its newest token; what drafts make of it stays in registers. The inputs
that programs share are kept by the one of a group that comes last.
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
from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.mamba2_decode import gated_output, moved_on, step_of
from runahead.runtime.kernels.triton.recurrent_rows import row_of
from runahead.runtime.kernels.triton.recurrent_runs import (
    convolved_of,
    input_of,
    keep_inputs,
    leave_channels,
    places_of,
)
from runahead.runtime.kernels.triton.state_tiling import STATES, StateTiling


@triton.jit(do_not_specialize=["queries"])
def _mamba2_run_kernel(
    projected, conv_weight, conv_bias, a, d, dt_bias, gamma, conv_state, state, kept, state_slots, read_from, copied_to,
    copied_after, replayed, seq_lens, positions, query_start_loc, made, out, arrived, low, high, eps, queries,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, STATE_PAD: tl.constexpr, GROUP_PAD: tl.constexpr, EACH_PAD: tl.constexpr,
    MOST_PAD: tl.constexpr, HAS_BIAS: tl.constexpr, KEPT: tl.constexpr, DEPENDENT: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One program for TILE numbers of a head of a row with up to `queries` query tokens."""
    let_dependents_start(DEPENDENT)
    INNER: tl.constexpr = HEADS * HEAD_DIM
    SHARE: tl.constexpr = INNER // GROUPS
    EACH: tl.constexpr = HEADS // GROUPS
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    INPUTS: tl.constexpr = CHANNELS + HEADS
    WIDTH: tl.constexpr = INNER + INPUTS
    SIZE: tl.constexpr = HEADS * HEAD_DIM * STATE  # numbers of a slot
    TILES: tl.constexpr = (HEAD_DIM + TILE - 1) // TILE
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
    start, count, slot, source, copy, live, goes_on = row_of(
        row, state_slots, read_from, copied_to, seq_lens, positions, query_start_loc, SNAPSHOTS
    )
    live = live & (count <= queries)
    goes_on = goes_on & live
    again = tl.load(replayed + row, mask=live, other=0)
    after = again
    if SNAPSHOTS:
        after = tl.load(copied_after + row, mask=live, other=0)
    of_head = state + (head * HEAD_DIM + dim[:, None]) * STATE + n[None, :]
    in_tile = in_head[:, None] & in_state[None, :]
    held = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    wait_for_predecessors(DEPENDENT)
    line = start.to(tl.int64)
    own = made + row.to(tl.int64) * queries * INNER
    if live:
        slope = tl.load(a + head)
        straight = tl.load(d + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
        for step in range(again + count):
            x = convolved_of(
                projected, kept, conv_state, conv_weight, conv_bias, line, slot, source, x_channel, step, again,
                in_head, goes_on, INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, HAS_BIAS,
            )  # fmt: skip
            b = convolved_of(
                projected, kept, conv_state, conv_weight, conv_bias, line, slot, source, b_channel, step, again,
                in_state, goes_on, INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, HAS_BIAS,
            )  # fmt: skip
            raw = input_of(
                projected, kept, conv_state, line, slot, source, CHANNELS + head, step, again, live, goes_on, INNER,
                WIDTH, INPUTS, CHANNELS, WINDOW, MOST,
            )  # fmt: skip
            held = moved_on(held, x, b, step_of(raw, bias, low, high), slope)
            if step == again:  # the newest token: what follows is not certain
                tl.store(of_head + slot * SIZE, held, mask=in_tile)
            if SNAPSHOTS:
                if (copy >= 0) & (step + 1 == after):
                    tl.store(of_head + copy * SIZE, held, mask=in_tile)
            if step >= again:
                c = convolved_of(
                    projected, kept, conv_state, conv_weight, conv_bias, line, slot, source, c_channel, step, again,
                    in_state, goes_on, INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, HAS_BIAS,
                )  # fmt: skip
                z = tl.load(projected + (line + step - again) * WIDTH + x_channel, mask=in_head, other=0.0)
                y = gated_output(held, c, x, straight, z.to(tl.float32))
                tl.store(own + (step - again) * INNER + x_channel, y, mask=in_head)
        tl.debug_barrier()
        leave_channels(
            projected, kept, conv_state, line, slot, source, copy, x_channel, again, count, after, in_head, goes_on,
            INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, MOST_PAD, KEPT, SNAPSHOTS,
        )  # fmt: skip
        meeting = arrived + row * GROUPS + group
        if tl.atomic_add(meeting, 1, sem="acq_rel") == EACH * TILES - 1:
            tl.store(meeting, 0)
            leave_channels(
                projected, kept, conv_state, line, slot, source, copy, b_channel, again, count, after, in_state,
                goes_on, INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, MOST_PAD, KEPT, SNAPSHOTS,
            )  # fmt: skip
            leave_channels(
                projected, kept, conv_state, line, slot, source, copy, c_channel, again, count, after, in_state,
                goes_on, INNER, WIDTH, INPUTS, CHANNELS, WINDOW, MOST, MOST_PAD, KEPT, SNAPSHOTS,
            )  # fmt: skip
            each = tl.arange(0, EACH_PAD)
            steps = CHANNELS + group * EACH + each
            keep_inputs(projected, kept, line, slot, steps, count, each < EACH, INNER, WIDTH, INPUTS, MOST, MOST_PAD)
            i = tl.arange(0, GROUP_PAD)
            ok = i < SHARE
            at = group * SHARE + i
            weight = tl.load(gamma + at, mask=ok, other=0.0).to(tl.float32)
            for further in range(count):
                value = tl.load(own + further * INNER + at, mask=ok, other=0.0, cache_modifier=".cg")
                scale = tl.rsqrt(tl.sum(value * value, 0) / SHARE + eps)
                value = (value * scale * weight).to(out.dtype.element_ty)
                tl.store(out + (line + further) * INNER + at, value, mask=ok)
    elif count <= queries:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        for further in range(count):
            tl.store(out + (line + further) * INNER + x_channel, nothing, mask=in_head)


def mamba2_of_runs(
    projected: torch.Tensor,
    weights: Mamba2,
    states: tuple[torch.Tensor, ...],
    batch: ForwardBatch,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    dependent: bool,
    tiling: StateTiling = STATES,
) -> None:
    """What `weights.out` reads of rows that decode, which have up to `batch.decode_queries` query tokens, and their
    states as far as their newest tokens, in place.

    states: as `mamba2_of_one_token` has them, and behind them the inputs of drafts, float32 [state slots of rows, K,
    `Kept.inputs`]: as many as `batch.replayed` says are replayed, then those of the row's new drafts are kept. Slots of
    rows that are masked or have more query tokens stay as they are. The rest is as there.
    """
    shape, rows, queries = weights.shape, batch.num_rows, batch.decode_queries
    conv_state, state, kept = states
    most = kept.shape[1]
    assert queries <= 1 + most, "more drafts than a slot has room for"
    tile = tiling.tile(shape.head_dim, shape.state)
    low, high = weights.dt_limits
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _mamba2_run_kernel[(rows, shape.heads * triton.cdiv(shape.head_dim, tile))](
        projected,
        weights.conv_weight,
        weights.conv_weight if weights.conv_bias is None else weights.conv_bias,
        weights.a,
        weights.d,
        weights.dt_bias,
        weights.gated_norm.weight,
        conv_state,
        state,
        kept,
        *places_of(batch),
        batch.seq_lens,
        batch.positions,
        batch.query_start_loc,
        torch.empty((rows * queries, shape.inner), dtype=torch.float32, device=projected.device),
        out,
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
        GROUP_PAD=triton.next_power_of_2(shape.inner // shape.groups),
        EACH_PAD=triton.next_power_of_2(shape.heads // shape.groups),
        MOST_PAD=triton.next_power_of_2(most),
        HAS_BIAS=weights.conv_bias is not None,
        KEPT=triton.next_power_of_2(shape.window - 1),
        DEPENDENT=dependent,
        SNAPSHOTS=batch.states_read_from is not None,
        num_warps=tiling.warps,
        **options,
    )
