"""Products of one row with a matrix, the norm before and what follows after in the same kernel.

Reading the weights takes all of the time: a program asks for as many of them as its registers hold before it waits for
the row. Sums are float32 multiply-adds; the matrix units would idle.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.activations import is_gelu
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.triton.gemm.tuning import RowTiling
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.gpu.unrolled import longer
from runahead.runtime.kernels.triton.ops.activation import gated, squared_relu

STORE: Final = 0  # out = product
ADD: Final = 1  # out += product
GATED: Final = 2  # out = activation(gate) * up, of the product's two halves
SQUARED: Final = 3  # out = relu(product)^2
EPILOGUES: Final = ("store", "add", "gated", "squared")  # their names
_READ_AT_ONCE: Final = 32 * 16  # bytes that a warp reads by one instruction
_ADD, _GATED, _SQUARED = tl.constexpr(ADD), tl.constexpr(GATED), tl.constexpr(SQUARED)


@triton.jit
def _weights(base, gamma, first, k, DEPTH: tl.constexpr, NORM: tl.constexpr):
    """Entries of the depth from `first` on: of the matrix's rows, [rows, BLOCK], and of the norm's weight, as `k`."""
    g = 1.0
    if NORM:
        g = tl.load(gamma + first + k, mask=first + k < DEPTH, other=0.0)
    inside = first + tl.arange(0, k.shape[1])[None, :] < DEPTH
    return tl.load(base + first, mask=inside, other=0.0), g


@triton.jit
def outputs_of_row(
    tile, x, weight, bias, gamma, out, places, eps, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, PREFETCHED: tl.constexpr, NORM: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs from tile * ROWS on, with the dependency wait. SIDE: see `side_by_side`. PREFETCHED: blocks
    of BLOCK weights that are loaded before the wait."""
    HALVES: tl.constexpr = 2 if EPILOGUE == _GATED else 1
    PARTS: tl.constexpr = HALVES * ROWS // SIDE
    r = tl.arange(0, HALVES * ROWS)[:, None]
    row = tl.minimum(tile * ROWS + r % ROWS, OUTPUTS - 1) + r // ROWS * OUTPUTS
    base = weight + row.to(tl.int64) * DEPTH + tl.arange(0, BLOCK)[None, :]
    k = tl.arange(0, BLOCK)[None, :] + tl.zeros([SIDE, 1], tl.int32)
    prefetched, scales = (), ()
    for c in tl.static_range(PREFETCHED):
        w, g = _weights(base, gamma, c * BLOCK, k, DEPTH, NORM)
        prefetched, scales = longer(prefetched, w), longer(scales, g)
    if HAS_BIAS:
        added = tl.load(bias + row)
    wait_for_predecessors(DEPENDENT)
    if EPILOGUE == _ADD:  # one thread of a row's has it, so that nothing is waited for at the end
        MOST: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
        WIDE: tl.constexpr = MOST if MOST < BLOCK else BLOCK
        reader = tl.arange(0, BLOCK // WIDE)[None, :]
        # Times 1, and readers side by side, as no compiler can know better: so each has it where it begins with it.
        old = tl.load(out + row * tl.num_programs(1) + reader, mask=reader == 0, other=0.0)
        old = tl.where(tl.arange(0, WIDE) == 0, old.to(tl.float32)[:, :, None], 0.0)
        old = tl.reshape(old, [PARTS, SIDE, BLOCK])
    for first in tl.static_range(0, DEPTH, BLOCK):
        if first < PREFETCHED * BLOCK:
            w, g = prefetched[first // BLOCK], scales[first // BLOCK]
        else:
            w, g = _weights(base, gamma, first, k, DEPTH, NORM)
        v = tl.load(x + first + k, mask=first + k < DEPTH, other=0.0).to(tl.float32)
        square = v * v
        if NORM:
            v *= g.to(tl.float32)
        products = tl.reshape(w, [PARTS, SIDE, BLOCK]).to(tl.float32) * v[None, :, :]
        if first == 0:
            squares, acc = square, products
            if EPILOGUE == _ADD and not NORM:
                acc += old
        else:
            squares += square
            acc += products
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / DEPTH + eps)[None, :, :]
        if EPILOGUE == _ADD:  # a sum that is scaled can't begin with it
            acc = acc * scale + old
    total = tl.sum(acc, 2, keep_dims=True)
    if NORM and EPILOGUE != _ADD:
        total *= scale
    if HAS_BIAS:
        total += tl.reshape(added, [PARTS, SIDE, 1]).to(tl.float32)
    if EPILOGUE == _GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, [2, ROWS])))
        total = gated(gate, up, GELU)
    else:
        total = tl.reshape(total, [ROWS])
    if EPILOGUE == _SQUARED:
        total = squared_relu(total)
    if PLACED:
        out += tl.load(places).to(tl.int64) * OUTPUTS
    output = tile * ROWS + tl.arange(0, ROWS)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=output < OUTPUTS)


@triton.jit
def _row_product_kernel(
    x, weight, bias, gamma, out, places, eps, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, PREFETCHED: tl.constexpr, NORM: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs."""
    let_dependents_start(DEPENDENT)
    outputs_of_row(
        tl.program_id(0), x, weight, bias, gamma, out, places, eps, OUTPUTS, DEPTH, ROWS, SIDE, BLOCK, PREFETCHED, NORM,
        EPILOGUE, HAS_BIAS, PLACED, DEPENDENT, GELU,
    )  # fmt: skip


def side_by_side(rows: int, block: int, warps: int, itemsize: int) -> int:
    """How many of a program's `rows` of weights its threads read side by side, each 16 bytes of a block: a power of
    two, as the others are.

    What these are multiplied by each thread then reads in the same places, so that no thread waits for another until
    the sums; and with as many rows as warps not even then, but for what is stored. What is read has two dimensions:
    how threads share out three of them differs between versions of Triton."""
    return max(1, min(rows, warps * _READ_AT_ONCE // (block * itemsize)))


def gemv_product(
    x: torch.Tensor,
    linear: Linear,
    norm: Norm | None,
    out: torch.Tensor,
    epilogue: int,
    tiling: RowTiling,
    places: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> None:
    """out (epilogue)= norm(x) @ weight.T + bias, for one row.

    x: contiguous, its first row is used, [in]. linear: weight [out, in], twice as many rows if GATED. norm: over x;
    None: x as it is. out: contiguous, its first row, [out]. activation: of the gate, if GATED.
    """
    outputs, depth = linear.weight.shape
    halves = 2 if epilogue == GATED else 1
    outputs //= halves
    options: dict[str, Any] = {"launch_pdl": True} if tiling.dependent else {}
    _row_product_kernel[(triton.cdiv(outputs, tiling.rows),)](
        x,
        linear.weight,
        linear.weight if linear.bias is None else linear.bias,
        linear.weight if norm is None else norm.weight,
        out,
        x if places is None else places,
        0.0 if norm is None else norm.eps,
        OUTPUTS=outputs,
        DEPTH=depth,
        ROWS=tiling.rows,
        SIDE=side_by_side(halves * tiling.rows, tiling.block, tiling.warps, linear.weight.element_size()),
        BLOCK=tiling.block,
        PREFETCHED=min(tiling.held, triton.cdiv(depth, tiling.block)),
        NORM=norm is not None,
        EPILOGUE=epilogue,
        HAS_BIAS=linear.bias is not None,
        PLACED=places is not None,
        DEPENDENT=tiling.dependent,
        GELU=is_gelu(activation),
        num_warps=tiling.warps,
        **options,
    )
