"""Grouped products of tokens with their experts.

A program computes a tile of outputs of an item, which is an expert and some of its tokens (`routing.py`). The expert's
weights are the left operand of the matrix units, the item's gathered tokens the right one. So a chosen expert is read
once, and again through the cache if its tokens need several items; other experts are not read.

The shared expert is computed by the same kernels, in pieces as wide as the other experts. A piece has items of all
tokens, which need no list, and separate results.

With weights in FP8 rows become FP8, and one float32 accumulator for each output adds the sums of 128 columns, in the
order and with the roundings of `gemm/fp8_gemm.py`.

One program sums the whole depth, in ascending order, so a row's bits depend on nothing else
(`gemm/small_batch_gemm.py`). A token's results are stored by entry, in the order of expert numbers, and added in that
order. They depend neither on the item nor on the order in which programs end.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Linear
from runahead.runtime.kernels.quantized_weight import FP8_COLUMNS, ExpertFp8
from runahead.runtime.kernels.triton.gemm.epilogue import gated_row
from runahead.runtime.kernels.triton.gemm.fp8_rows import Fp8Rows
from runahead.runtime.kernels.triton.gemm.separate_epilogue import fp8_rows
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.moe import routing
from runahead.runtime.kernels.triton.moe.routing import LEAST_BLOCK, Routing
from runahead.runtime.kernels.triton.moe.topk import (
    choice_sizes,
    chosen_experts,
    numbers_of_experts,
    routing_weights_of,
)
from runahead.runtime.kernels.triton.moe.tuning import (
    FIRST_GATED,
    FIRST_SQUARED,
    LAST,
    ExpertProduct,
    expert_tiling,
)
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.rounding import ceil_div

_FIRST_GATED, _FIRST_SQUARED, _LAST = tl.constexpr(FIRST_GATED), tl.constexpr(FIRST_SQUARED), tl.constexpr(LAST)
_NO_CHOICE: Final = Choice(1, renormalised=False)  # of a kernel that makes none
_ITEM = tl.constexpr(routing.ITEM)


@dataclass(frozen=True, slots=True)
class SharedProduct:
    """The shared expert in a product. x: input; in a first product the other experts' input, in the last one contiguous
    [T, width]. out: contiguous [T, width], in the last product float32 [T, pieces, outputs], where a piece is as wide
    as another expert. scores: float32 contiguous [T, n], of which the logistic function of the last one is a factor of
    the last product; None: no factor."""

    linear: Linear
    width: int
    x: torch.Tensor
    out: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoneToken:
    """The only token of a launch, whose first product chooses its experts. scores: float32 [1, experts or more], the
    experts' scores first. live: int32 [1], more than 0 unless the token is masked. squares: float64 [tiles or more, n];
    the first column has the sums of squares for its norm."""

    scores: torch.Tensor
    live: torch.Tensor
    choice: Choice
    squares: torch.Tensor
    tiles: int
    eps: float

    def unrouted(self) -> Routing:
        """Return a routing for the first product to fill: `items` are the expert numbers, int32 [chosen]."""
        chosen, scores = self.choice.chosen, self.scores
        numbers = torch.empty(chosen, dtype=torch.int32, device=scores.device)
        return Routing(scores.new_empty(chosen), numbers.view(1, -1)[:, :1], numbers, scores, LEAST_BLOCK)


class SharedTensors(NamedTuple):
    """The tensors of a `SharedProduct`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    out: torch.Tensor


@triton.jit(do_not_specialize=["num_tokens", "padded_rows"])
def _expert_product_kernel(
    x, x_scales, weight, weight_scales, routed, out, shared, scores, correction, lone, num_tokens, padded_rows,
    CHOICE: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, WHICH: tl.constexpr, SCALED: tl.constexpr, SHARED: tl.constexpr,
    SQUARES: tl.constexpr, ALL_SQUARES: tl.constexpr, STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens of an item, which go to one expert, by its matrix: ROWS outputs of an item a program.

    EVEN: BLOCK divides DEPTH, and the shared expert's last piece has the full depth. SCALE_ROWS: rows of the weights
    with one FP8 scale, for SCALE_COLUMNS columns, DEPTH or a multiple of BLOCK; both sides are in FP8; 0: 16 bits.
    shared: the shared expert, of width SHARED; its items come first. The logistic function of the last of a token's
    SCORES scores is a factor of its last product; 0: no factor. lone: there is one token, whose experts each program of
    the first product finds; `routed.items` are their numbers. SQUARES: tiles of the squares for its norm.
    """
    let_dependents_start(DEPENDENT)
    tile, nth = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = DEPTH if WHICH == _LAST else OUTPUTS
    PIECES: tl.constexpr = (SHARED + WIDTH - 1) // WIDTH
    listed = nth - (num_tokens + COLUMNS - 1) // COLUMNS * PIECES  # of the items that are, which; below 0: the shared
    wait_for_predecessors(DEPENDENT)
    if lone is not None:
        live, squares, eps = lone
        count, first = (tl.load(live) > 0).to(tl.int32), 0
        if WHICH == _LAST:
            number = tl.load(routed.items + tl.maximum(listed, 0))
        else:
            s = tl.arange(0, ALL_SQUARES)
            of_tiles = tl.load(squares + s * STRIDE, mask=s < SQUARES, other=0.0)
            number, is_first = 0 * nth, (tile == 0) & (nth == 0)
            if (listed >= 0) | is_first:
                chosen, index, score = chosen_experts(scores, correction, 0 * nth, CHOICE)
                e = numbers_of_experts(CHOICE.PADDED, CHOICE.COPIES)
                if is_first:  # it stores all of them and their routing weights for the last product
                    weights = routing_weights_of(score, chosen, CHOICE)
                    tl.store(routed.items + index, e, mask=chosen)
                    tl.store(routed.routing_weights + index, weights, mask=chosen)
                number = tl.max(tl.sum(tl.where(chosen & (index == listed), e, 0), 1), 0)  # each copy has the same
    else:
        item = routed.items + tl.maximum(listed, 0) * _ITEM
        count, number, first = tl.load(item + 2), tl.load(item), tl.load(item + 1)  # others are nothing where it is 0
    if SHARED > 0:
        is_shared, piece = listed < 0, nth % PIECES
        first = tl.where(is_shared, nth // PIECES * COLUMNS, first)
        count = tl.where(is_shared, tl.minimum(num_tokens - first, COLUMNS), count)
    if count > 0:
        expert = number.to(tl.int64)
        c = tl.arange(0, COLUMNS)
        ok = c < count
        TILE_ROWS: tl.constexpr = 2 * ROWS if WHICH == _FIRST_GATED else ROWS
        r = tl.arange(0, TILE_ROWS)
        if WHICH == _FIRST_GATED:
            row = gated_row(tile, r, OUTPUTS, ROWS)
        else:
            row = tl.minimum(tile * ROWS + r, OUTPUTS - 1)
        k = tl.arange(0, BLOCK)
        MATRIX: tl.constexpr = DEPTH * (2 * OUTPUTS if WHICH == _FIRST_GATED else OUTPUTS)
        depth = DEPTH
        stride = DEPTH
        if SHARED > 0:
            if lone is not None:
                listed_entry = listed + 0 * c
            else:
                at = routed.entries + expert * num_tokens + first + c
                listed_entry = tl.load(at, mask=ok & (listed >= 0), other=0)
            entry = tl.where(is_shared, first + c, listed_entry).to(tl.int64)
            matrix = tl.where(is_shared, shared.weight, weight + expert * MATRIX)
            rows_of_x = x
            if WHICH == _LAST:
                matrix += tl.where(is_shared, piece * DEPTH, 0)
                rows_of_x = tl.where(is_shared, shared.x + piece * DEPTH, x)
                stride = tl.where(is_shared, SHARED, DEPTH)
                depth = tl.where(is_shared, tl.minimum(SHARED - piece * DEPTH, DEPTH), DEPTH)
            else:
                mine = tl.minimum(piece * OUTPUTS + row % OUTPUTS, SHARED - 1) + row // OUTPUTS * SHARED
                row = tl.where(is_shared, mine, row)
        else:
            if lone is not None:
                entry = (listed + 0 * c).to(tl.int64)
            else:
                entry = tl.load(routed.entries + expert * num_tokens + first + c, mask=ok, other=0).to(tl.int64)
            matrix = weight + expert * MATRIX
            rows_of_x = x
        source = entry
        if WHICH != _LAST:
            source = entry // CHOICE.CHOSEN
            if SHARED > 0:
                source = tl.where(is_shared, entry, source)
        w_at = matrix + row.to(tl.int64)[:, None] * stride + k[None, :]
        x_at = rows_of_x + source[None, :] * stride + k[:, None]
        if SCALE_ROWS > 0:
            ALONG: tl.constexpr = (DEPTH + SCALE_COLUMNS - 1) // SCALE_COLUMNS
            scale_at = weight_scales + expert * (MATRIX // DEPTH // SCALE_ROWS * ALONG) + row // SCALE_ROWS * ALONG
            weight_scale = tl.load(scale_at)
            x_scale_at = x_scales + source
        acc = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        for begin in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
            if EVEN:
                w = tl.load(w_at + begin)
                v = tl.load(x_at + begin, mask=ok[None, :], other=0.0)
            else:
                there = begin + k < depth
                w = tl.load(w_at + begin, mask=there[None, :], other=0.0)
                v = tl.load(x_at + begin, mask=ok[None, :] & there[:, None], other=0.0)
            if SCALE_ROWS > 0:
                if SCALE_COLUMNS < DEPTH:
                    weight_scale = tl.load(scale_at + begin // SCALE_COLUMNS)
                x_scale = tl.load(x_scale_at + begin // BLOCK * padded_rows, mask=ok, other=0.0)
                acc = tl.fma(tl.dot(w, v), weight_scale[:, None] * x_scale[None, :], acc)
            else:
                acc = tl.dot(w, v, acc, input_precision="ieee")
        output = tile * ROWS + tl.arange(0, ROWS)
        if SCALED and lone is not None:
            acc *= tl.rsqrt(tl.sum(of_tiles, 0).to(tl.float32) / DEPTH + eps)
        if SCALED and lone is None:
            acc *= tl.load(routed.scale + source, mask=ok, other=0.0)[None, :]
        if SHARED > 0:
            if shared.bias is not None:
                # In the order of the tile's rows, gates among others; of the last product with one piece alone.
                has_bias = is_shared
                if WHICH == _LAST:
                    has_bias = is_shared & (piece == 0)
                acc += tl.load(shared.bias + row, mask=(r >= 0) & has_bias, other=0.0).to(tl.float32)[:, None]
        if WHICH == _FIRST_GATED:
            pairs = tl.permute(tl.reshape(acc, [ROWS // 8, 2, 8, COLUMNS]), (0, 2, 3, 1))
            gate, up = tl.split(pairs)
            acc = gated(tl.reshape(gate, [ROWS, COLUMNS]), tl.reshape(up, [ROWS, COLUMNS]), False)
        elif WHICH == _FIRST_SQUARED:
            acc = squared_relu(acc)
        elif SHARED > 0:
            routing_weight = tl.load(routed.routing_weights + entry, mask=ok & (listed >= 0), other=1.0)
            if CHOICE.SCORES > 0:
                score = tl.load(scores + entry * CHOICE.SCORES + CHOICE.SCORES - 1, mask=ok & is_shared, other=0.0)
                routing_weight = tl.where(is_shared, logistic(score), routing_weight)
            acc *= routing_weight[None, :]
        else:
            acc *= tl.load(routed.routing_weights + entry, mask=ok, other=0.0)[None, :]
        inside = output < OUTPUTS
        index = out + entry * OUTPUTS
        if SHARED > 0:
            if WHICH == _LAST:
                index = tl.where(is_shared, shared.out + (entry * PIECES + piece) * OUTPUTS, index)
            else:
                inside = inside & ((listed >= 0) | (piece * OUTPUTS + output < SHARED))
                index = tl.where(is_shared, shared.out + entry * SHARED + piece * OUTPUTS, index)
        at = index[None, :] + output[:, None]
        tl.store(at, acc.to(out.dtype.element_ty), mask=ok[None, :] & inside[:, None])


def expert_product(
    x: torch.Tensor,
    weight: torch.Tensor | ExpertFp8,
    routed: Routing,
    chosen: int,
    out: torch.Tensor,
    which: int,
    *,
    scaled: bool = False,
    shared: SharedProduct | None = None,
    lone: LoneToken | None = None,
    dependent: bool = False,
) -> None:
    """Every entry's product with its expert, into `out`, contiguous [T * chosen, outputs], by entry; rows of tokens
    that choose nobody are written by nobody.

    which: FIRST_GATED: x is contiguous [T, in], weight [experts, 2 * outputs, in], and what is left is silu(gate) * up;
    FIRST_SQUARED: the same with weight [experts, outputs, in] and relu(product)^2; LAST: x is [T * chosen, in], weight
    [experts, outputs, in], and every entry is multiplied by its routing weight. scaled: each token times its
    `routed.scale` first. shared: is computed beside them, or before them where they are in FP8, which it is not. lone:
    the only token, of which `routed` is `unrouted`: the first product chooses its experts and applies its norm's scale.
    dependent: launched programmatically.
    """
    launch = partial(_launch, routed, chosen, out, which, scaled=scaled, lone=lone, dependent=dependent)
    if isinstance(weight, torch.Tensor):
        launch(x, weight, shared, routed.items)
        return
    if shared is not None:
        launch(x, shared.linear.weight, shared, routed.items[:0], shape=weight.shape)
    launch(fp8_rows(x, len(x), dependent), weight, None, routed.items)


def _launch(
    routed: Routing,
    chosen: int,
    out: torch.Tensor,
    which: int,
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor | ExpertFp8,
    shared: SharedProduct | None,
    items: torch.Tensor,
    *,
    shape: torch.Size | None = None,
    scaled: bool,
    lone: LoneToken | None,
    dependent: bool,
) -> None:
    """The products of `items`, the first of `routed.items`, and of the shared expert; see `expert_product`. shape: of
    the experts' weights; None: of `weight`."""
    experts, outputs, depth = weight.shape if shape is None else shape
    tokens = routed.entries.shape[1]
    outputs //= 2 if which == FIRST_GATED else 1
    values, x_scales = (x.numbers, x.scales) if isinstance(x, Fp8Rows) else (x, x)
    width, tensors = 0, None
    if shared is not None:
        width, tensors = shared.width, SharedTensors(shared.linear.weight, shared.linear.bias, shared.x, shared.out)
    matrices, scales, scale_rows, scale_columns = weight, x_scales, 0, 0
    if isinstance(weight, ExpertFp8):
        matrices, scales = weight.numbers, weight.scales
        scale_rows, scale_columns = weight.scale_rows, min(weight.group, depth)
    assert isinstance(matrices, torch.Tensor)
    product = ExpertProduct(which, chosen, experts, outputs, depth, matrices.element_size())
    tiling = expert_tiling(product, tokens, routed.block)
    assert not scale_rows or tiling.block == FP8_COLUMNS
    choice, scores = _NO_CHOICE, None if shared is None else shared.scores
    if lone is not None and which != LAST:
        choice, scores = lone.choice, lone.scores
    sizes = choice_sizes(choice, experts, 0 if scores is None else scores.shape[1], tiling.warps)
    pieces = ceil_div(width, depth if which == LAST else outputs)
    programs = ceil_div(outputs, tiling.rows), pieces * ceil_div(tokens, routed.block) + len(items)
    _expert_product_kernel[programs](
        values,
        x_scales,
        matrices,
        scales,
        routed,
        out,
        tensors,
        scores,
        choice.correction,
        None if lone is None else (lone.live, lone.squares, lone.eps),
        tokens,
        len(values),
        CHOICE=sizes._replace(CHOSEN=chosen),
        OUTPUTS=outputs,
        DEPTH=depth,
        COLUMNS=routed.block,
        ROWS=tiling.rows,
        BLOCK=tiling.block,
        STAGES=tiling.stages,
        SCALE_ROWS=scale_rows,
        SCALE_COLUMNS=scale_columns,
        EVEN=depth % tiling.block == 0 and (which != LAST or width % depth == 0),
        WHICH=which,
        SCALED=scaled,
        SHARED=width,
        SQUARES=0 if lone is None else lone.tiles,
        ALL_SQUARES=1 if lone is None else triton.next_power_of_2(lone.tiles),
        STRIDE=0 if lone is None else lone.squares.shape[1],
        DEPENDENT=dependent,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
