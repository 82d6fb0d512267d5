"""The gated delta net of rows that decode where rows may have drafts, in one kernel: what
`recurrent/gated_delta_step.py` does, for the tokens of a run one after the other, of which the first are replayed from
the inputs in the row's slot.

A row's state is read and written once, behind its newest token; what drafts make of it stays in registers. The inputs
that programs share are kept by the one that comes last of the heads that share a key.
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
from runahead.runtime.kernels.triton.recurrent.gated_delta_step import normed_and_gated, query_of, written_to
from runahead.runtime.kernels.triton.recurrent.rows import row_of
from runahead.runtime.kernels.triton.recurrent.tiling import STATES, StateTiling
from runahead.runtime.kernels.triton.recurrent.verify import (
    chosen_of,
    convolved_of,
    drafts_of,
    input_of,
    keep_drafts,
    leave_channels,
    one_further,
    places_of,
    seen_before,
    taps_of,
)


@triton.jit
def _inputs_at(
    index, projected, kept, line, slot, q_channel, k_channel, v_channel, head, again, end, in_head, in_key,
    INNER: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, CHANNELS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """What a token brings, float32: query, key, value, how much of the value is written, and how far the state decays,
    before the bias. end: of the run, from where all is 0."""
    more = index < end
    q = input_of(projected, kept, line, slot, q_channel, index, again, in_key & more, INNER, WIDTH, INPUTS, MOST)
    k = input_of(projected, kept, line, slot, k_channel, index, again, in_key & more, INNER, WIDTH, INPUTS, MOST)
    v = input_of(projected, kept, line, slot, v_channel, index, again, in_head & more, INNER, WIDTH, INPUTS, MOST)
    at = CHANNELS + head
    b = input_of(projected, kept, line, slot, at, index, again, more, INNER, WIDTH, INPUTS, MOST)
    dt = input_of(projected, kept, line, slot, at + VALUE_HEADS, index, again, more, INNER, WIDTH, INPUTS, MOST)
    return q, k, v, b, dt


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
def _delta_verify_kernel(
    projected, conv_weight, a, dt_bias, gamma, conv_state, state, kept, state_slots, read_from, copied_to, copied_after,
    replayed, seq_lens, positions, query_start_loc, made, out, arrived, eps, queries, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, EACH_PAD: tl.constexpr,
    MOST_PAD: tl.constexpr, DEPENDENT: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """One program for TILE numbers of a head of values of a row with up to `queries` query tokens."""
    let_dependents_start(DEPENDENT)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + INNER
    INPUTS: tl.constexpr = CHANNELS + 2 * VALUE_HEADS
    WIDTH: tl.constexpr = INNER + INPUTS
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
    live = live & (count <= queries)
    goes_on = goes_on & live
    again = tl.load(replayed + row, mask=live, other=0)
    after = again
    if SNAPSHOTS:
        after = tl.load(copied_after + row, mask=live, other=0)
    of_head = state + (head * VALUE_DIM + dim[:, None]) * KEY_DIM + i[None, :]
    in_tile = in_head[:, None] & in_key[None, :]
    state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
    q_seen = seen_before(conv_state, source, q_channel, in_key & goes_on, CHANNELS, WINDOW)
    k_seen = seen_before(conv_state, source, k_channel, in_key & goes_on, CHANNELS, WINDOW)
    v_seen = seen_before(conv_state, source, v_channel, in_head & goes_on, CHANNELS, WINDOW)
    q_taps = taps_of(conv_weight, conv_weight, q_channel, in_key, WINDOW, False)
    k_taps = taps_of(conv_weight, conv_weight, k_channel, in_key, WINDOW, False)
    v_taps = taps_of(conv_weight, conv_weight, v_channel, in_head, WINDOW, False)
    slope = tl.load(a + head)
    bias = tl.load(dt_bias + head).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    line = start.to(tl.int64)
    own = made + row.to(tl.int64) * queries * INNER
    if live:
        q_left, k_left, v_left = q_seen, k_seen, v_seen
        q_there, k_there, v_there = q_seen, k_seen, v_seen
        ahead = _inputs_at(
            0, projected, kept, line, slot, q_channel, k_channel, v_channel, head, again, again + count, in_head,
            in_key, INNER, WIDTH, INPUTS, CHANNELS, VALUE_HEADS, MOST,
        )  # fmt: skip
        for step in range(again + count):
            q_new, k_new, v_new, b, dt = ahead
            # What the next token brings is asked for before anything waits for this one's.
            ahead = _inputs_at(
                step + 1, projected, kept, line, slot, q_channel, k_channel, v_channel, head, again, again + count,
                in_head, in_key, INNER, WIDTH, INPUTS, CHANNELS, VALUE_HEADS, MOST,
            )  # fmt: skip
            query = convolved_of(q_seen, q_new, q_taps, WINDOW)
            key = convolved_of(k_seen, k_new, k_taps, WINDOW)
            value = convolved_of(v_seen, v_new, v_taps, WINDOW)
            q_seen = one_further(q_seen, q_new, WINDOW)
            k_seen = one_further(k_seen, k_new, WINDOW)
            v_seen = one_further(v_seen, v_new, WINDOW)
            state_tile = written_to(state_tile, key, value, b, dt + bias, slope)
            if step == again:  # the newest token: what follows is not certain
                tl.store(of_head + slot * SIZE, state_tile, mask=in_tile)
            q_left = chosen_of(step == again, q_seen, q_left, WINDOW)
            k_left = chosen_of(step == again, k_seen, k_left, WINDOW)
            v_left = chosen_of(step == again, v_seen, v_left, WINDOW)
            if SNAPSHOTS:
                if (copy >= 0) & (step + 1 == after):
                    tl.store(of_head + copy * SIZE, state_tile, mask=in_tile)
                q_there = chosen_of(step + 1 == after, q_seen, q_there, WINDOW)
                k_there = chosen_of(step + 1 == after, k_seen, k_there, WINDOW)
                v_there = chosen_of(step + 1 == after, v_seen, v_there, WINDOW)
            if step >= again:
                y = tl.sum(state_tile * query_of(query, KEY_DIM)[None, :], 1)
                tl.store(own + (step - again) * INNER + index, y, mask=in_head)
        tl.debug_barrier()
        meeting = arrived + row * KEY_HEADS + of_keys
        is_last = tl.atomic_add(meeting, 1, sem="acq_rel") == EACH * TILES - 1
        v_drafts = drafts_of(projected, line, v_channel, count, in_head, INNER, WIDTH, MOST_PAD)
        leave_channels(conv_state, slot, v_channel, v_left, in_head, CHANNELS, WINDOW)
        if SNAPSHOTS:
            leave_channels(conv_state, copy, v_channel, v_there, in_head & (copy >= 0), CHANNELS, WINDOW)
        if is_last:
            tl.store(meeting, 0)
            each = tl.arange(0, EACH_PAD)
            steps = CHANNELS + of_keys * EACH + each
            is_own = each < EACH
            q_drafts = drafts_of(projected, line, q_channel, count, in_key, INNER, WIDTH, MOST_PAD)
            k_drafts = drafts_of(projected, line, k_channel, count, in_key, INNER, WIDTH, MOST_PAD)
            b_drafts = drafts_of(projected, line, steps, count, is_own, INNER, WIDTH, MOST_PAD)
            step_drafts = drafts_of(projected, line, steps + VALUE_HEADS, count, is_own, INNER, WIDTH, MOST_PAD)
            j = tl.arange(0, VALUE_PAD)
            ok = j < VALUE_DIM
            weight = tl.load(gamma + j, mask=ok, other=0.0).to(tl.float32)
            leave_channels(conv_state, slot, q_channel, q_left, in_key, CHANNELS, WINDOW)
            leave_channels(conv_state, slot, k_channel, k_left, in_key, CHANNELS, WINDOW)
            if SNAPSHOTS:
                leave_channels(conv_state, copy, q_channel, q_there, in_key & (copy >= 0), CHANNELS, WINDOW)
                leave_channels(conv_state, copy, k_channel, k_there, in_key & (copy >= 0), CHANNELS, WINDOW)
            keep_drafts(kept, slot, q_channel, q_drafts, count, in_key, INPUTS, MOST, MOST_PAD)
            keep_drafts(kept, slot, k_channel, k_drafts, count, in_key, INPUTS, MOST, MOST_PAD)
            keep_drafts(kept, slot, steps, b_drafts, count, is_own, INPUTS, MOST, MOST_PAD)
            keep_drafts(kept, slot, steps + VALUE_HEADS, step_drafts, count, is_own, INPUTS, MOST, MOST_PAD)
            made_next = _made_of(
                own, projected, line, of_keys * EACH, 0, j, count * EACH, EACH, VALUE_DIM, INNER, WIDTH
            )
            for number in range(count * EACH):
                y, z = made_next
                made_next = _made_of(
                    own, projected, line, of_keys * EACH, number + 1, j, count * EACH, EACH, VALUE_DIM, INNER, WIDTH
                )
                token, at = number // EACH, (of_keys * EACH + number % EACH) * VALUE_DIM + j
                y = normed_and_gated(y, z, weight, eps, VALUE_DIM).to(out.dtype.element_ty)
                tl.store(out + (line + token) * INNER + at, y, mask=ok)
        keep_drafts(kept, slot, v_channel, v_drafts, count, in_head, INPUTS, MOST, MOST_PAD)
    elif count <= queries:
        nothing = tl.zeros([TILE], out.dtype.element_ty)
        for token in range(count):
            tl.store(out + (line + token) * INNER + index, nothing, mask=in_head)


def verify_gated_delta(
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
    """What `weights.out` reads of rows that decode, which have up to `batch.decode_queries` query tokens, and their
    states as far as their newest tokens, in place.

    states: as `delta_of_one_token` has them, and behind them the inputs of drafts, float32 [state slots of rows, K,
    `Kept.inputs`]: as many as `batch.replayed` says are replayed, then those of the row's new drafts are kept. Slots of
    rows that are masked or have more query tokens stay as they are. The rest is as there.
    """
    shape, rows, queries = weights.shape, batch.num_rows, batch.decode_queries
    conv_state, state, kept = states
    most = kept.shape[1]
    assert queries <= 1 + most, "more drafts than a slot has room for"
    tile = tiling.tile(shape.value_dim, shape.key_dim)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _delta_verify_kernel[(rows, shape.value_heads * triton.cdiv(shape.value_dim, tile))](
        projected,
        weights.conv_weight,
        weights.a,
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
        weights.gated_norm.eps,
        queries,
        KEY_HEADS=shape.key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_HEADS=shape.value_heads,
        VALUE_DIM=shape.value_dim,
        WINDOW=shape.window,
        MOST=most,
        TILE=tile,
        KEY_PAD=triton.next_power_of_2(shape.key_dim),
        VALUE_PAD=triton.next_power_of_2(shape.value_dim),
        EACH_PAD=triton.next_power_of_2(shape.value_heads // shape.key_heads),
        MOST_PAD=triton.next_power_of_2(most),
        DEPENDENT=dependent,
        SNAPSHOTS=batch.states_read_from is not None,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        **options,
    )
