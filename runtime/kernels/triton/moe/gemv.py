"""Experts of a launch of one row: float32 multiply-adds, since the matrix units would idle.

Two kernels follow the product that makes the scores. One program of the first names the row's experts, and those that
read weights find by themselves which expert they are for; the second has each output's sum over all experts of the row.
Nothing has to be listed, and no result meets another. The shared expert is in the same two kernels: what they read of
it hangs on no choice, and they ask for the first of it before they wait.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Linear, Norm, SharedExpert
from runahead.runtime.kernels.triton.gemm import gemv
from runahead.runtime.kernels.triton.gemm.gemv import outputs_of_row, side_by_side
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.moe.lone_token import lone_expert
from runahead.runtime.kernels.triton.moe.topk import choice_parts
from runahead.runtime.kernels.triton.moe.tuning import (
    FIRST_GATED,
    FIRST_SQUARED,
    LAST,
    ExpertProduct,
    ExpertRowTiling,
    expert_row_tiling,
)
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.gates import logistic

# Guesses, which no tuner tries.
_SHARED_ROWS: Final = 8  # of a shared expert: outputs of a program of the first kernel
_SHARED_WEIGHTS: Final = 4096  # of it, that such a program asks for together, _SHARED_PREFETCHED times before it waits
_SHARED_PREFETCHED: Final = 3
_GATED, _SQUARED = tl.constexpr(gemv.GATED), tl.constexpr(gemv.SQUARED)


@triton.jit
def _chunk(w_at, x, gamma, first, k, length):
    """Of a depth's entries from `first` on, those before `length`: weights, [rows, BLOCK], what they are multiplied by,
    and the norm's weight, both as `k`, [SIDE, BLOCK]."""
    inside = first + tl.arange(0, k.shape[1])[None, :] < length
    w, ok = tl.load(w_at + first, mask=inside, other=0.0), first + k < length
    return w, tl.load(x + first + k, mask=ok, other=0.0), tl.load(gamma + first + k, mask=ok, other=0.0)


@triton.jit
def _multiplied(acc, squares, w, v, g):
    """The sums of products, and of squares, and what a chunk adds to them."""
    v = v.to(tl.float32)
    return acc + tl.reshape(w, acc.shape).to(tl.float32) * (v * g.to(tl.float32))[None, :, :], squares + v * v


@triton.jit
def _gate_up_kernel(
    x, scores, correction, live, weight, shared, shared_bias, gamma, named, routing_weights, out, shared_out, eps,
    COUNT: tl.constexpr, SCORES: tl.constexpr, CHOSEN: tl.constexpr, PADDED: tl.constexpr,
    RENORMALISED: tl.constexpr, LOGISTIC: tl.constexpr, CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    FACTOR: tl.constexpr, COPIES: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    SHARED: tl.constexpr, SHARED_ROWS: tl.constexpr, SHARED_SIDE: tl.constexpr, SHARED_BLOCK: tl.constexpr,
    SHARED_PREFETCHED: tl.constexpr, SHARED_BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first program names the row's experts, and leaves their shares. The next are for SHARED_ROWS of the shared
    expert's SHARED outputs each; 0: there is none. Then one program for ROWS outputs of one of the row's experts, which
    it finds by itself. GATED: or else by a squared ReLU. SIDE: weights' rows that the threads hold side by side; each
    thread reads for itself what they are multiplied by, and waits for no other until the sums."""
    let_dependents_start(DEPENDENT)
    FIRST: tl.constexpr = 1 + (SHARED + SHARED_ROWS - 1) // SHARED_ROWS
    TILES: tl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if SHARED > 0:
        if (program > 0) & (program < FIRST):
            outputs_of_row(
                program - 1, x, shared, shared_bias, gamma, shared_out, x, eps, SHARED, DEPTH, SHARED_ROWS,
                SHARED_SIDE, SHARED_BLOCK, SHARED_PREFETCHED, True, _GATED if GATED else _SQUARED, SHARED_BIAS,
                False, DEPENDENT, False,
            )  # fmt: skip
    if (program == 0) | (program >= FIRST):
        wait_for_predecessors(DEPENDENT)
        is_live = tl.load(live) > 0  # what does not hang on it goes on meanwhile
        tile, index = (program - FIRST) % TILES, (program - FIRST) // TILES
        expert = lone_expert(
            index, program == 0, scores, correction, named, routing_weights, COUNT, SCORES, CHOSEN, PADDED,
            RENORMALISED, LOGISTIC, CORRECTED, GROUPS, PADDED_GROUPS, CHOSEN_GROUPS, FACTOR, COPIES,
        )  # fmt: skip
        if is_live & (program > 0):
            HALVES: tl.constexpr = 2 if GATED else 1
            PARTS: tl.constexpr = HALVES * ROWS // SIDE
            r = tl.arange(0, HALVES * ROWS)[:, None]
            row = tl.minimum(tile * ROWS + r % ROWS, OUTPUTS - 1) + r // ROWS * OUTPUTS
            matrix = weight + expert.to(tl.int64) * (HALVES * OUTPUTS * DEPTH)
            w_at = matrix + row.to(tl.int64) * DEPTH + tl.arange(0, BLOCK)[None, :]
            k = tl.arange(0, BLOCK)[None, :] + tl.zeros([SIDE, 1], tl.int32)
            w0, v0, g0 = _chunk(w_at, x, gamma, 0, k, DEPTH)
            w1, v1, g1 = _chunk(w_at, x, gamma, BLOCK, k, DEPTH)
            acc = tl.zeros([PARTS, SIDE, BLOCK], tl.float32)
            squares = tl.zeros([SIDE, BLOCK], tl.float32)
            # Unrolled, the compiler would ask for a chunk where it is used, and too few would be on their way.
            for first in tl.range(2 * BLOCK, DEPTH, 2 * BLOCK):
                w2, v2, g2 = _chunk(w_at, x, gamma, first, k, DEPTH)
                w3, v3, g3 = _chunk(w_at, x, gamma, first + BLOCK, k, DEPTH)
                acc, squares = _multiplied(acc, squares, w0, v0, g0)
                acc, squares = _multiplied(acc, squares, w1, v1, g1)
                w0, v0, g0, w1, v1, g1 = w2, v2, g2, w3, v3, g3
            acc, squares = _multiplied(acc, squares, w0, v0, g0)
            acc, squares = _multiplied(acc, squares, w1, v1, g1)
            scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / DEPTH + eps)
            total = tl.sum(acc, 2, keep_dims=True) * scale[None, :, :]
            if GATED:
                gate, up = tl.split(tl.trans(tl.reshape(total, [2, ROWS])))
                total = gated(gate, up, False)
            else:
                total = squared_relu(tl.reshape(total, [ROWS]))
            output = tile * ROWS + tl.arange(0, ROWS)
            tl.store(out + index * OUTPUTS + output, total.to(out.dtype.element_ty), mask=output < OUTPUTS)


@triton.jit
def _down_kernel(
    x, live, weight, named, routing_weights, scores, shared_x, shared, shared_bias, residual, COUNT: tl.constexpr,
    CHOSEN: tl.constexpr, PLACES: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, SHARED_BLOCK: tl.constexpr,
    SHARED_BIAS: tl.constexpr, SHARE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs: all experts' products, times their shares, added up, and what the shared expert has
    made of SHARED numbers, if there is one; SHARE: times the logistic function of the score behind those of COUNT
    experts. All is added to the residual."""
    let_dependents_start(DEPENDENT)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, OUTPUTS - 1)
    p = tl.arange(0, PLACES)
    k = tl.arange(0, BLOCK)
    if SHARED > 0:
        s = tl.arange(0, SHARED_BLOCK)
        shared_at = shared + row.to(tl.int64)[:, None] * SHARED + s[None, :]
        held = tl.load(shared_at, mask=(s < SHARED)[None, :], other=0.0)
        if SHARED_BIAS:
            added = tl.load(shared_bias + row)
    wait_for_predecessors(DEPENDENT)
    # All of it is asked for together; of a masked row the shares are anything, and nothing is used.
    is_live, expert = tl.load(live) > 0, tl.load(named + p, mask=p < CHOSEN, other=0).to(tl.int64)
    share, old = tl.load(routing_weights + p, mask=p < CHOSEN, other=0.0), tl.load(residual + row)
    if SHARED > 0:
        of_shared = held.to(tl.float32) * tl.load(shared_x + s, mask=s < SHARED, other=0.0).to(tl.float32)[None, :]
        if SHARE:
            score = tl.load(scores + COUNT)
    if is_live:
        w_at = weight + expert[:, None, None] * (OUTPUTS * DEPTH) + row.to(tl.int64)[None, :, None] * DEPTH
        w_at += k[None, None, :]
        x_at = x + p[:, None] * DEPTH + k[None, :]
        acc = tl.zeros([PLACES, ROWS, BLOCK], tl.float32)
        for first in tl.static_range(0, DEPTH, BLOCK):
            ok = (p < CHOSEN)[:, None] & (first + k < DEPTH)[None, :]
            w = tl.load(w_at + first, mask=ok[:, None, :], other=0.0)
            v = tl.load(x_at + first, mask=ok, other=0.0)
            acc += w.to(tl.float32) * v.to(tl.float32)[:, None, :]
        total = tl.sum(tl.sum(acc, 2) * share[:, None], 0)
        if SHARED > 0:
            for first in tl.static_range(SHARED_BLOCK, SHARED, SHARED_BLOCK):
                inside = first + s < SHARED
                w = tl.load(shared_at + first, mask=inside[None, :], other=0.0)
                v = tl.load(shared_x + first + s, mask=inside, other=0.0)
                of_shared += w.to(tl.float32) * v.to(tl.float32)[None, :]
            beside = tl.sum(of_shared, 1)
            if SHARED_BIAS:
                beside += added.to(tl.float32)
            if SHARE:
                beside *= logistic(score)
            total += beside
        total += old.to(tl.float32)
        tl.store(residual + output, total.to(residual.dtype.element_ty), mask=output < OUTPUTS)


def experts_of_one_row(
    residual: torch.Tensor,
    scores: torch.Tensor,
    live: torch.Tensor,
    norm: Norm,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    choice: Choice,
    *,
    shared: SharedExpert | None = None,
    has_gates: bool = True,
    dependent: bool,
    gates: ExpertRowTiling | None = None,
    downs: ExpertRowTiling | None = None,
) -> None:
    """residual += what the row's experts, and the shared one, make of its norm; nothing, and no expert that is chosen
    is read, if the row is masked.

    residual: contiguous, its first row is used, [hidden]. scores: float32, of the first row [experts], and one more for
    a shared expert that has a share. live: int [1], more than 0 for a row that is not masked. gate_up: contiguous
    [experts, 2 * width, hidden], or without gates [experts, width, hidden]. down: contiguous [experts, hidden, width].
    shared: has another width. dependent:
    both kernels are launched programmatically. gates, downs: how the first and the second are cut; None takes that of
    `expert_row_tiling`.
    """
    count, hidden, width = down.shape
    device, chosen = residual.device, choice.chosen
    named = torch.empty(chosen, dtype=torch.int32, device=device)
    routing_weights = torch.empty(chosen, dtype=torch.float32, device=device)
    both = residual.new_empty((chosen, width))
    first, last, beside = Linear(gate_up, None), Linear(down, None), 0  # of the shared expert; anything without one
    if shared is not None:
        first, last, beside = shared.gate_up, shared.down, shared.width
    of_shared = residual.new_empty(beside)
    halves, itemsize = 2 if has_gates else 1, down.element_size()
    if gates is None:
        which = FIRST_GATED if has_gates else FIRST_SQUARED
        gates = expert_row_tiling(ExpertProduct(which, chosen, count, width, hidden, itemsize))
    if downs is None:
        downs = expert_row_tiling(ExpertProduct(LAST, chosen, count, hidden, width, itemsize))
    shared_block = min(triton.next_power_of_2(hidden), _SHARED_WEIGHTS // (halves * _SHARED_ROWS))
    block = min(triton.next_power_of_2(hidden), gates.weights // (2 * gates.rows))
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _gate_up_kernel[(1 + triton.cdiv(beside, _SHARED_ROWS) + triton.cdiv(width, gates.rows) * chosen,)](
        residual,
        scores,
        scores if choice.correction is None else choice.correction,
        live,
        gate_up,
        first.weight,
        first.weight if first.bias is None else first.bias,
        norm.weight,
        named,
        routing_weights,
        both,
        of_shared,
        norm.eps,
        OUTPUTS=width,
        DEPTH=hidden,
        ROWS=gates.rows,
        SIDE=side_by_side(halves * gates.rows, block, gates.warps, itemsize),
        BLOCK=block,
        GATED=has_gates,
        SHARED=beside,
        SHARED_ROWS=_SHARED_ROWS,
        SHARED_SIDE=side_by_side(halves * _SHARED_ROWS, shared_block, gates.warps, itemsize),
        SHARED_BLOCK=shared_block,
        SHARED_PREFETCHED=min(_SHARED_PREFETCHED, triton.cdiv(hidden, shared_block)),
        SHARED_BIAS=first.bias is not None,
        DEPENDENT=dependent,
        num_warps=gates.warps,
        **choice_parts(choice, count, scores.shape[1], gates.warps),
        **options,
    )
    indexes = triton.next_power_of_2(chosen)
    _down_kernel[(triton.cdiv(hidden, downs.rows),)](
        both,
        live,
        down,
        named,
        routing_weights,
        scores,
        of_shared,
        last.weight,
        last.weight if last.bias is None else last.bias,
        residual,
        COUNT=count,
        CHOSEN=chosen,
        PLACES=indexes,
        OUTPUTS=hidden,
        DEPTH=width,
        ROWS=downs.rows,
        BLOCK=max(min(triton.next_power_of_2(width), downs.weights // (indexes * downs.rows)), 16),
        SHARED=beside,
        SHARED_BLOCK=max(min(triton.next_power_of_2(max(beside, 1)), downs.weights // downs.rows), 16),
        SHARED_BIAS=last.bias is not None,
        SHARE=shared is not None and shared.share is not None,
        DEPENDENT=dependent,
        num_warps=downs.warps,
        **options,
    )
