"""The gated delta net of rows that decode, in one kernel: convolution, lengths, state, output, norm and gate.

A row has its newest token, before it the drafts that are replayed, and behind it new drafts; without room for drafts a
run is one token (`runs.py`). A program has some numbers of one head of values, with the state of each; its query and
its key each finds for itself. A row's state is read and written once, behind its newest token. The norm is over a head:
of the heads that share a key, the program that comes last takes it for each of them. It also moves on the convolution's
window of query and key and keeps their inputs, which the others have read by then.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GatedDelta
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import sum_of_squares
from runahead.runtime.kernels.triton.recurrent.rows import leave_state, softplus
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

_LENGTH_EPS = tl.constexpr(1e-6)  # of a query's and a key's length


@triton.jit
def _made_of(
    own, projected, line, head, number, j, end, EACH: tl.constexpr, VALUE_DIM: tl.constexpr, INNER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Output `number` of the run, counted over EACH heads from `head` on and then over tokens, and its gate: float32,
    zeros from `end` on."""
    ok = (j < VALUE_DIM) & (number < end)
    token, at = number // EACH, (head + number % EACH) * VALUE_DIM + j
    y = tl.load(own + token * INNER + at, mask=ok, other=0.0, cache_modifier=".cg")
    return y, tl.load(projected + (line + token) * WIDTH + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["queries"])
def _delta_decode_kernel(
    projected, conv_weight, a, dt_bias, gamma, states, rows, made, out, arrived, eps, queries, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, EACH_PAD: tl.constexpr, SIZES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the gated delta net of rows with up to `queries` query tokens: TILE numbers of a head a program.

    states: as `delta_of_decode_rows` has them. made: float32 [rows * queries, VALUE_HEADS * VALUE_DIM], outputs before
    the norm. arrived: int32 [rows * KEY_HEADS] counts the programs of a key that have ended.
    """
    let_dependents_start(DEPENDENT)
    conv_state, state, kept = states
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = SIZES.WIDTH
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
    start, count, slot, source, copy, live, goes_on, replayed, after, tokens = run_of(row, queries, rows, SIZES)
    of_head = state + (head * VALUE_DIM + dim[:, None]) * KEY_DIM + i[None, :]
    in_tile = in_head[:, None] & in_key[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    channels, masks = (q_channel, k_channel, v_channel), (in_key, in_key, in_head)
    windows = windows_of(conv_state, source, channels, masks, goes_on, SIZES)
    taps = taps_of(conv_weight, None, channels, masks, SIZES)
    slope = tl.load(a + head)
    bias = tl.load(dt_bias + head).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    line = start.to(tl.int64)
    if live:
        own = made + row.to(tl.int64) * queries * INNER
        beta_column = SIZES.CHANNELS + head
        columns = (q_channel, k_channel, v_channel, beta_column, beta_column + VALUE_HEADS)
        of_columns = (in_key, in_key, in_head, True, True)
        ahead = inputs_of(0, projected, kept, line, slot, columns, of_columns, replayed, tokens, SIZES)
        for step in range(tokens):
            inputs = ahead
            if SIZES.DRAFTS > 0:  # the next token's inputs are loaded before anything waits for this one's
                ahead = inputs_of(step + 1, projected, kept, line, slot, columns, of_columns, replayed, tokens, SIZES)
            query, key, value = convolved_of(windows, inputs, taps, SIZES)
            windows = moved_windows(windows, inputs, step == replayed, step + 1 == after, SIZES)
            b, dt = inputs[3], inputs[4]
            key = key * tl.rsqrt(sum_of_squares(key) + _LENGTH_EPS)
            state_tile = state_tile * tl.exp(softplus(dt + bias) * slope)
            known = tl.sum(state_tile * key[None, :], 1)
            state_tile = state_tile + (logistic(b) * (value - known))[:, None] * key[None, :]
            if SIZES.DRAFTS > 0:
                if step == replayed:  # the newest token: what follows is not certain
                    tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
                if SIZES.SNAPSHOTS:
                    if (copy >= 0) & (step + 1 == after):
                        tl.store(of_head + copy * SIZE, state_tile, mask=in_tile)
            if step >= replayed:
                scaled = query * (tl.rsqrt(sum_of_squares(query) + _LENGTH_EPS) * (KEY_DIM**-0.5))
                y = tl.sum(state_tile * scaled[None, :], 1)
                tl.store(own + (step - replayed) * INNER + index, y, mask=in_head)
        tl.debug_barrier()
        meeting = arrived + row * KEY_HEADS + of_keys
        is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == EACH * TILES - 1
        if SIZES.DRAFTS == 0:
            # Behind the meeting: it waits until all that was written before it is there for all to see.
            leave_state(of_head, slot, copy, state_tile, in_tile, SIZE, SIZES.SNAPSHOTS)
        else:
            v_drafts = drafts_of(projected, line, (v_channel,), count, (in_head,), SIZES)
        leave_windows(conv_state, slot, copy, (v_channel,), windows[2:], (in_head,), SIZES)
        if is_last:
            tl.store(meeting, 0)
            if SIZES.DRAFTS > 0:
                each = tl.arange(0, EACH_PAD)
                steps = SIZES.CHANNELS + of_keys * EACH + each
                shared_columns = (q_channel, k_channel, steps, steps + VALUE_HEADS)
                of_shared = (in_key, in_key, each < EACH, each < EACH)
                shared_drafts = drafts_of(projected, line, shared_columns, count, of_shared, SIZES)
            j = tl.arange(0, VALUE_PAD)
            ok = j < VALUE_DIM
            weight = tl.load(gamma + j, mask=ok, other=0.0).to(tl.float32)
            leave_windows(conv_state, slot, copy, channels[:2], windows[:2], masks[:2], SIZES)
            if SIZES.DRAFTS > 0:
                keep_drafts(kept, slot, shared_columns, shared_drafts, count, of_shared, SIZES)
            outputs = (tokens - replayed) * EACH
            made_next = _made_of(own, projected, line, of_keys * EACH, 0, j, outputs, EACH, VALUE_DIM, INNER, WIDTH)
            for number in range(outputs):
                y, z = made_next
                made_next = _made_of(
                    own, projected, line, of_keys * EACH, number + 1, j, outputs, EACH, VALUE_DIM, INNER, WIDTH
                )
                token, at = number // EACH, (of_keys * EACH + number % EACH) * VALUE_DIM + j
                y = y * (tl.rsqrt(sum_of_squares(y) / VALUE_DIM + eps) * weight)
                tl.store(out + (line + token) * INNER + at, (y * z * logistic(z)).to(out.dtype.element_ty), mask=ok)
        if SIZES.DRAFTS > 0:
            keep_drafts(kept, slot, (v_channel,), v_drafts, count, (in_head,), SIZES)
    elif count <= queries:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        for token in range(count):
            tl.store(out + (line + token) * INNER + index, nothing, mask=in_head)


def delta_of_decode_rows(
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
    """Compute the input of `weights.out` for rows that decode, with up to `batch.decode_queries` query tokens, and
    advance their states to the newest token, in place.

    projected: contiguous [T, inner + channels + 2 * value_heads]. states: float32, of this mixer, [state slots,
    window - 1, channels], [state slots, value_heads, value_dim, key_dim] and the inputs of up to K drafts, [state slots
    of rows, K, `Kept.inputs`]. Inputs of `batch.replayed` are replayed, then the inputs of the row's new drafts are
    kept. Slots of rows that are masked or have more query tokens are unchanged. out: contiguous [T, inner]; rows with
    more query tokens are not written, masked rows get zeros. arrived: int32 [rows * key_heads or more], zeros before
    and after. dependent: launched programmatically. tiling: of states.
    """
    shape, rows, queries = weights.shape, batch.num_rows, batch.decode_queries
    most = states[2].shape[1]
    tile = tiling.tile(shape.value_dim, shape.key_dim)
    _delta_decode_kernel[(rows, shape.value_heads * triton.cdiv(shape.value_dim, tile))](
        projected,
        weights.conv_weight,
        weights.a,
        weights.dt_bias,
        weights.gated_norm.weight,
        states,
        rows_of_runs(batch, most),
        torch.empty((rows * queries, shape.inner), dtype=torch.float32, device=projected.device),
        out,
        arrived,
        weights.gated_norm.eps,
        queries,
        KEY_HEADS=shape.key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_HEADS=shape.value_heads,
        VALUE_DIM=shape.value_dim,
        TILE=tile,
        KEY_PAD=triton.next_power_of_2(shape.key_dim),
        VALUE_PAD=triton.next_power_of_2(shape.value_dim),
        EACH_PAD=triton.next_power_of_2(shape.value_heads // shape.key_heads),
        SIZES=run_sizes(shape.inner, weights.conv_weight, 2 * shape.value_heads, most, batch),
        DEPENDENT=dependent,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
