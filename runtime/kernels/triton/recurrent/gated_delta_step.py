"""The gated delta net of rows with one query token, in one kernel: convolution, lengths, state, output, norm and gate.

A program has some numbers of one head of values, with what the head keeps of them; its query and its key each finds for
itself. The norm is over a head: of the heads that share a key, the program that comes last takes it for each of them,
and moves on what the convolution has seen of query and key, which the others have read by then. A row's state is read
and written once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GatedDelta
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import sum_of_squares
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

_LENGTH_EPS = tl.constexpr(1e-6)  # of a query's and a key's length


@triton.jit
def query_of(query, KEY_DIM: tl.constexpr):
    """A query divided by its length, and scaled."""
    return query * (tl.rsqrt(sum_of_squares(query) + _LENGTH_EPS) * (KEY_DIM**-0.5))


@triton.jit
def written_to(state_tile, key, value, b, dt, slope):
    """A state [numbers of a head of values, numbers of a key] one token further. key: as it was convolved. dt: with its
    bias."""
    key = key * tl.rsqrt(sum_of_squares(key) + _LENGTH_EPS)
    state_tile = state_tile * tl.exp(softplus(dt) * slope)
    known = tl.sum(state_tile * key[None, :], 1)
    return state_tile + (logistic(b) * (value - known))[:, None] * key[None, :]


@triton.jit
def normed_and_gated(y, z, weight, eps, VALUE_DIM: tl.constexpr):
    """Of one head of values."""
    y = y * (tl.rsqrt(sum_of_squares(y) / VALUE_DIM + eps) * weight)
    return y * z * logistic(z)


@triton.jit
def _delta_row_kernel(
    projected, conv_weight, a, dt_bias, gamma, conv_state, state, state_slots, read_from, copied_to, seq_lens,
    positions, query_start_loc, made, out, arrived, eps, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr, KEPT: tl.constexpr, DEPENDENT: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One program for TILE numbers of a head of values of a row."""
    let_dependents_start(DEPENDENT)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + INNER
    WIDTH: tl.constexpr = INNER + CHANNELS + 2 * VALUE_HEADS
    SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM  # numbers of a slot
    EACH: tl.constexpr = VALUE_HEADS // KEY_HEADS
    TILES: tl.constexpr = (VALUE_DIM + TILE - 1) // TILE
    row, program = tl.program_id(0), tl.program_id(1)
    head = program // TILES
    of_keys = head // EACH
    dim = program % TILES * TILE + tl.arange(0, TILE)
    i = tl.arange(0, KEY_PAD)
    in_head, in_key = dim < VALUE_DIM, i < KEY_DIM
    q_channel = of_keys * KEY_DIM + i
    k_channel = q_channel + KEYS
    index = head * VALUE_DIM + dim  # among all values
    v_channel = 2 * KEYS + index
    # Lengths, slots and what earlier launches have left are constant until this kernel writes it.
    start, count, slot, source, copy, live, goes_on = row_of(
        row, state_slots, read_from, copied_to, seq_lens, positions, query_start_loc, SNAPSHOTS
    )
    live = live & (count == 1)
    goes_on = goes_on & live
    of_head = state + (head * VALUE_DIM + dim[:, None]) * KEY_DIM + i[None, :]
    in_tile = in_head[:, None] & in_key[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    q_sum = sum_of_kept(conv_state, conv_weight, source, q_channel, in_key & goes_on, CHANNELS, WINDOW)
    k_sum = sum_of_kept(conv_state, conv_weight, source, k_channel, in_key & goes_on, CHANNELS, WINDOW)
    v_sum = sum_of_kept(conv_state, conv_weight, source, v_channel, in_head & goes_on, CHANNELS, WINDOW)
    q_tap = newest_tap(conv_weight, conv_weight, q_channel, in_key, WINDOW, False)
    k_tap = newest_tap(conv_weight, conv_weight, k_channel, in_key, WINDOW, False)
    v_tap = newest_tap(conv_weight, conv_weight, v_channel, in_head, WINDOW, False)
    slope, bias = tl.load(a + head), tl.load(dt_bias + head).to(tl.float32)
    q_later = moved_channels(conv_state, source, q_channel, in_key & goes_on, CHANNELS, WINDOW, KEPT)
    k_later = moved_channels(conv_state, source, k_channel, in_key & goes_on, CHANNELS, WINDOW, KEPT)
    v_later = moved_channels(conv_state, source, v_channel, in_head & goes_on, CHANNELS, WINDOW, KEPT)
    wait_for_predecessors(DEPENDENT)
    line = projected + start.to(tl.int64) * WIDTH
    if live:
        q_new = tl.load(line + INNER + q_channel, mask=in_key, other=0.0).to(tl.float32)
        k_new = tl.load(line + INNER + k_channel, mask=in_key, other=0.0).to(tl.float32)
        v_new = tl.load(line + INNER + v_channel, mask=in_head, other=0.0).to(tl.float32)
        b = tl.load(line + INNER + CHANNELS + head).to(tl.float32)
        dt = tl.load(line + INNER + CHANNELS + VALUE_HEADS + head).to(tl.float32)
        key, value = convolved(k_sum, k_new, k_tap), convolved(v_sum, v_new, v_tap)
        state_tile = written_to(state_tile, key, value, b, dt + bias, slope)
        query = query_of(convolved(q_sum, q_new, q_tap), KEY_DIM)
        own = made + row.to(tl.int64) * INNER
        tl.store(own + index, tl.sum(state_tile * query[None, :], 1), mask=in_head)
        tl.debug_barrier()
        meeting = arrived + row * KEY_HEADS + of_keys
        is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == EACH * TILES - 1
        # Behind the meeting, which waits until what was written before it is there for all to see.
        tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
        if SNAPSHOTS:
            tl.store(of_head + copy * SIZE, state_tile, mask=in_tile & (copy >= 0))
        shift_channels(conv_state, slot, copy, v_channel, v_later, v_new, in_head, CHANNELS, WINDOW, KEPT, SNAPSHOTS)
        if is_last:
            tl.store(meeting, 0)
            shift_channels(conv_state, slot, copy, q_channel, q_later, q_new, in_key, CHANNELS, WINDOW, KEPT, SNAPSHOTS)
            shift_channels(conv_state, slot, copy, k_channel, k_later, k_new, in_key, CHANNELS, WINDOW, KEPT, SNAPSHOTS)
            j = tl.arange(0, VALUE_PAD)
            ok = j < VALUE_DIM
            weight = tl.load(gamma + j, mask=ok, other=0.0).to(tl.float32)
            for further in range(EACH):
                at = (of_keys * EACH + further) * VALUE_DIM + j
                y = tl.load(own + at, mask=ok, other=0.0, cache_modifier=".cg")
                z = tl.load(line + at, mask=ok, other=0.0).to(tl.float32)
                y = normed_and_gated(y, z, weight, eps, VALUE_DIM).to(out.dtype.element_ty)
                tl.store(out + start.to(tl.int64) * INNER + at, y, mask=ok)
    elif count == 1:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        tl.store(out + start.to(tl.int64) * INNER + index, nothing, mask=in_head)


def delta_of_one_token(
    projected: torch.Tensor,
    weights: GatedDelta,
    states: tuple[torch.Tensor, ...],
    batch: ForwardBatch,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    dependent: bool,
    tiling: StateTiling = STATES,
) -> None:
    """What `weights.out` reads of rows with one query token, and their states one token further, in place.

    projected: contiguous [T, inner + channels + 2 * value_heads]. states: float32, of this mixer, [state slots,
    window - 1, channels] and [state slots, value_heads, value_dim, key_dim]; slots of rows that are masked or have
    another number of query tokens stay as they are. out: contiguous [T, inner]; rows of several query tokens are not
    written, and of masked rows it is zeros. arrived: int32 [rows * key_heads or more], zeros, which it is again
    afterwards. dependent: launched programmatically. tiling: how states are cut.
    """
    assert batch.state_slots is not None, "a model that keeps states is given a batch that names no state slots"
    shape, rows = weights.shape, batch.num_rows
    conv_state, state = states
    tile = tiling.tile(shape.value_dim, shape.key_dim)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _delta_row_kernel[(rows, shape.value_heads * triton.cdiv(shape.value_dim, tile))](
        projected,
        weights.conv_weight,
        weights.a,
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
        torch.empty((rows, shape.inner), dtype=torch.float32, device=projected.device),
        out,
        arrived,
        weights.gated_norm.eps,
        KEY_HEADS=shape.key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_HEADS=shape.value_heads,
        VALUE_DIM=shape.value_dim,
        WINDOW=shape.window,
        TILE=tile,
        KEPT=triton.next_power_of_2(shape.window - 1),
        KEY_PAD=triton.next_power_of_2(shape.key_dim),
        VALUE_PAD=triton.next_power_of_2(shape.value_dim),
        DEPENDENT=dependent,
        SNAPSHOTS=batch.states_read_from is not None,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        **options,
    )
