"""The gated delta net of rows with several query tokens: by products of matrices within a sub-chunk, from one to the
next by the state.

With s the running sum of the logarithms of the decays, S the state before a sub-chunk and u_j what token j writes:

    u_i = beta_i * (v_i - exp(s_i) * S k_i - sum over j < i of exp(s_i - s_j) * (k_j k_i) * u_j)
    y_i = exp(s_i) * S q_i + sum over j <= i of exp(s_i - s_j) * (k_j q_i) * u_j

The first are equations with a unit triangular matrix, whose inverse depends on no state: one kernel finds it for all
sub-chunks side by side. In the other a program has some numbers of one head of values of a row, goes through the row's
sub-chunks and holds the state meanwhile.

Source: Yang et al., 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3
(the WY representation of Bischof and Van Loan, 1987), with the decays of Yang, Kautz and Hatamizadeh, 2024, "Gated
Delta Networks: Improving Mamba2 with Delta Rule", section 3.3.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.layers import GatedDelta
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.recurrent.rows import leave_state, row_of, softplus
from runahead.runtime.kernels.triton.recurrent.scan import (
    ChunkRows,
    convolve,
    gated_norm,
    keep_channels,
    stages_of_scans,
)

_STATE_WORDS: Final = 4096  # float32 numbers of a state that a program holds, at most
_LEAST_SIDE: Final = 16  # of a matrix that the matrix units take
_LENGTH_EPS = tl.constexpr(1e-6)  # of a query's and a key's length
_SIDE = tl.constexpr(16)  # of the blocks that are inverted number by number


@triton.jit
def _decays(projected, token, ours, a, dt_bias, head, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """The running sum of the logarithms of the decays of a sub-chunk, [LENGTH]. FIRST: where dt begins in a line."""
    dt = tl.load(projected + token * WIDTH + FIRST + head, mask=ours, other=0.0).to(tl.float32)
    dt = softplus(dt + tl.load(dt_bias + head).to(tl.float32))
    return tl.cumsum(tl.where(ours, dt * tl.load(a + head), 0.0), 0)


@triton.jit
def _divided_by_length(at, ok):
    """Lines of queries or keys, each divided by its length; lines that are not there are zeros. Float32."""
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + _LENGTH_EPS)[:, None]


@triton.jit
def _inverse(lower, LENGTH: tl.constexpr, PRECISION: tl.constexpr):
    """Invert the unit matrix plus `lower`, which is strictly below the diagonal, [LENGTH, LENGTH]. The blocks of _SIDE
    on the diagonal are inverted by forward substitution, all at once. What is below them then is a matrix whose fourth
    power is nothing, so that two products more are the rest of the series."""
    tl.static_assert(LENGTH <= 4 * _SIDE)
    r = tl.arange(0, LENGTH)
    same = r[:, None] // _SIDE == r[None, :] // _SIDE
    within = tl.where(same, lower, 0.0)
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, _SIDE):
        mine = r[:, None] % _SIDE == i
        factors = tl.sum(tl.where(mine, within, 0.0), 0)  # by column: of the line i of its block
        found = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(mine & same, found[None, :], 0.0)
    x = tl.dot(inverse, tl.where(same, 0.0, lower), input_precision=PRECISION)
    squared = tl.dot(x, x, input_precision=PRECISION)
    found = inverse + tl.dot(squared, inverse, input_precision=PRECISION)
    return found - tl.dot(x, found, input_precision=PRECISION)


@triton.jit
def _delta_solve_kernel(
    projected, convolved, a, dt_bias, rows, parts, positions, query_start_loc, out, KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH: tl.constexpr,
    KEY_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Invert the triangular matrix of each sub-chunk and head of values, a program each, times beta by column.

    out: [sub-chunks, VALUE_HEADS, LENGTH, LENGTH], in the model's dtype.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + INNER
    WIDTH: tl.constexpr = INNER + CHANNELS + 2 * VALUE_HEADS
    number, head = tl.program_id(0), tl.program_id(1)
    part = tl.load(parts + number)
    if part >= 0:
        row = tl.load(rows + number)
        start = tl.load(query_start_loc + row)
        count = tl.load(query_start_loc + row + 1) - start
        r = tl.arange(0, LENGTH)
        i = part * LENGTH - (tl.load(positions + start) % LENGTH).to(tl.int32) + r
        ours = (i >= 0) & (i < count)
        token = (start + i).to(tl.int64)
        total = _decays(projected, token, ours, a, dt_bias, head, INNER + CHANNELS + VALUE_HEADS, WIDTH)
        beta = logistic(
            tl.load(projected + token * WIDTH + INNER + CHANNELS + head, mask=ours, other=0.0).to(tl.float32)
        )
        k = tl.arange(0, KEY_PAD)
        of_keys = head // (VALUE_HEADS // KEY_HEADS)
        at = convolved + token[:, None] * CHANNELS + KEYS + of_keys * KEY_DIM + k[None, :]
        key = _divided_by_length(at, ours[:, None] & (k < KEY_DIM)[None, :]).to(convolved.dtype.element_ty)
        later = tl.where(r[:, None] > r[None, :], total[:, None] - total[None, :], float("-inf"))
        lower = tl.dot(key, tl.trans(key), input_precision="ieee") * tl.exp(later) * beta[:, None]
        inverse = _inverse(lower, LENGTH, PRECISION) * beta[None, :]
        index = (number * VALUE_HEADS + head).to(tl.int64) * LENGTH * LENGTH
        tl.store(out + index + r[:, None] * LENGTH + r[None, :], inverse.to(out.dtype.element_ty))


@triton.jit
def _delta_scan_kernel(
    projected, convolved, inverses, before, a, dt_bias, state, rows, y, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr, KEY_PAD: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """Compute the gated delta net of a row's sub-chunks in turn: TILE numbers of a head of values a program.

    convolved: [T, channels]. inverses: from `_delta_solve_kernel`. before: int32 [rows], sub-chunks of earlier rows.
    state: float32 [state slots, VALUE_HEADS, VALUE_DIM, KEY_DIM]. y: [T, VALUE_HEADS * VALUE_DIM].
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    INNER: tl.constexpr = VALUE_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + INNER
    WIDTH: tl.constexpr = INNER + CHANNELS + 2 * VALUE_HEADS
    SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM * KEY_DIM  # numbers of a slot
    row, head = tl.program_id(0), tl.program_id(1)
    of_keys = head // (VALUE_HEADS // KEY_HEADS)
    dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, KEY_PAD)
    r = tl.arange(0, LENGTH)
    in_head, in_key = dim < VALUE_DIM, k < KEY_DIM
    start, count, slot, source, copy, live, goes_on = row_of(row, rows, SNAPSHOTS)
    if live & (count > 1):
        offset = (tl.load(rows.positions + start) % LENGTH).to(tl.int32)  # tokens of other chunks
        of_head = state + (head * VALUE_DIM + dim[:, None]) * KEY_DIM + k[None, :]
        in_tile = in_head[:, None] & in_key[None, :]
        state_tile = tl.load(of_head + source * SIZE, mask=in_tile & goes_on, other=0.0)
        first = tl.load(before + row)
        for part in range((offset + count + LENGTH - 1) // LENGTH):
            i = part * LENGTH - offset + r
            ours = (i >= 0) & (i < count)
            token = (start + i).to(tl.int64)
            total = _decays(projected, token, ours, a, dt_bias, head, INNER + CHANNELS + VALUE_HEADS, WIDTH)
            line = convolved + token[:, None] * CHANNELS
            q_at = line + of_keys * KEY_DIM + k[None, :]
            seen = ours[:, None] & in_key[None, :]
            query = (_divided_by_length(q_at, seen) * (KEY_DIM**-0.5)).to(convolved.dtype.element_ty)
            key = _divided_by_length(q_at + KEYS, seen).to(convolved.dtype.element_ty)
            inside = ours[:, None] & in_head[None, :]
            value = tl.load(line + 2 * KEYS + head * VALUE_DIM + dim[None, :], mask=inside, other=0.0)
            index = ((first + part) * VALUE_HEADS + head).to(tl.int64) * LENGTH * LENGTH
            inverse = tl.load(inverses + index + r[:, None] * LENGTH + r[None, :])
            turned = tl.trans(state_tile).to(key.dtype)
            known = tl.dot(key, turned, input_precision="ieee") * tl.exp(total)[:, None]
            written = tl.dot(inverse, (value.to(tl.float32) - known).to(key.dtype), input_precision="ieee")
            later = tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], float("-inf"))
            weights = tl.dot(query, tl.trans(key), input_precision="ieee") * tl.exp(later)
            found = tl.dot(query, turned, input_precision="ieee") * tl.exp(total)[:, None]
            found = tl.dot(weights.to(key.dtype), written.to(key.dtype), found, input_precision="ieee")
            at = y + token[:, None] * INNER + head * VALUE_DIM + dim[None, :]
            tl.store(at, found.to(y.dtype.element_ty), mask=inside)
            end = tl.sum(tl.where(r == LENGTH - 1, total, 0.0), 0)
            added = (written * tl.exp(end - total)[:, None]).to(key.dtype)
            state_tile = tl.dot(tl.trans(added), key, state_tile * tl.exp(end), input_precision="ieee")
        leave_state(of_head, slot, copy, state_tile, in_tile, SIZE, SNAPSHOTS)


def delta_of_chunks(
    projected: torch.Tensor, weights: GatedDelta, states: tuple[torch.Tensor, ...], rows: ChunkRows
) -> torch.Tensor:
    """Compute the input of `weights.out`, [T, inner], for rows with several query tokens, and advance their states by
    these tokens, in place.

    projected, states: see `delta_of_decode_rows`; slots of rows that are masked or have one query token are unchanged,
    and the result for their tokens and for padding is zeros.
    """
    shape, batch, length = weights.shape, rows.batch, rows.length
    conv_state, state = states
    convolved = convolve(projected, weights.conv_weight, None, conv_state, rows, shape.inner)
    keep_channels(projected, conv_state, rows, shape.inner)
    key_pad = max(triton.next_power_of_2(shape.key_dim), _LEAST_SIDE)
    tile = max(min(triton.next_power_of_2(shape.value_dim), _STATE_WORDS // key_pad), _LEAST_SIDE)
    parts = rows.sub_chunks
    inverses = projected.new_empty((parts.most, shape.value_heads, length, length))
    sizes = {
        "KEY_HEADS": shape.key_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_HEADS": shape.value_heads,
        "VALUE_DIM": shape.value_dim,
        "LENGTH": length,
        "KEY_PAD": key_pad,
    }
    _delta_solve_kernel[(parts.most, shape.value_heads)](
        projected,
        convolved,
        weights.a,
        weights.dt_bias,
        parts.row,
        parts.part,
        batch.positions,
        batch.query_start_loc,
        inverses,
        **sizes,
        PRECISION="ieee" if projected.dtype == torch.float32 else "tf32x3",
        num_warps=4,
    )
    y = projected.new_empty((projected.shape[0], shape.inner))
    _delta_scan_kernel[(batch.num_rows, shape.value_heads, triton.cdiv(shape.value_dim, tile))](
        projected,
        convolved,
        inverses,
        parts.before,
        weights.a,
        weights.dt_bias,
        state,
        rows.states,
        y,
        **sizes,
        TILE=tile,
        SNAPSHOTS=rows.snapshots,
        num_warps=4,
        num_stages=stages_of_scans(),
    )
    norm = weights.gated_norm
    return gated_norm(projected, y, norm.weight, norm.eps, rows, shape.value_heads, gate_first=False)
