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

from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.triton.activation import gated, squared_relu
from runahead.runtime.kernels.triton.dependent_launch import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.tilings import RowTiling

STORE: Final = 0  # out = product
ADD: Final = 1  # out += product
GATED: Final = 2  # out = activation(gate) * up, of the product's two halves
SQUARED: Final = 3  # out = relu(product)^2
EPILOGUES: Final = ("store", "add", "gated", "squared")  # their names
_ADD, _GATED, _SQUARED = tl.constexpr(ADD), tl.constexpr(GATED), tl.constexpr(SQUARED)


@triton.jit
def _weights(base, gamma, first, DEPTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """BLOCK entries of the depth: of the matrix's rows, and of the norm's weight."""
    k = first + tl.arange(0, BLOCK)
    g = 1.0
    if NORM:
        g = tl.load(gamma + k, mask=k < DEPTH, other=0.0)
    return tl.load(base + first, mask=(k < DEPTH)[None, :], other=0.0), g


@triton.jit
def _chunk(x, g, first, DEPTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """BLOCK entries of the row, times the norm's weight, and their squares."""
    k = first + tl.arange(0, BLOCK)
    v = tl.load(x + k, mask=k < DEPTH, other=0.0).to(tl.float32)
    square = v * v
    if NORM:
        v *= g.to(tl.float32)
    return v, square


@triton.jit
def outputs_of_row(
    tile, x, weight, bias, gamma, out, places, eps, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """What a program does for ROWS outputs, from tile * ROWS on; the wait is in it. HELD: chunks of BLOCK weights that
    are asked for before the wait."""
    HALVES: tl.constexpr = 2 if EPILOGUE == _GATED else 1
    CHUNKS: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    r = tl.arange(0, ROWS * HALVES)
    output = tile * ROWS + r % ROWS
    ok = output < OUTPUTS
    row = tl.where(ok, output, 0) + r // ROWS * OUTPUTS
    k = tl.arange(0, BLOCK)
    base = weight + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    w0, g0 = _weights(base, gamma, 0, DEPTH, BLOCK, NORM)
    if HELD > 1:
        w1, g1 = _weights(base, gamma, BLOCK, DEPTH, BLOCK, NORM)
    if HELD > 2:
        w2, g2 = _weights(base, gamma, 2 * BLOCK, DEPTH, BLOCK, NORM)
    if HELD > 3:
        w3, g3 = _weights(base, gamma, 3 * BLOCK, DEPTH, BLOCK, NORM)
    if HAS_BIAS:
        added = tl.load(bias + row, mask=ok, other=0.0)
    wait_for_predecessors(DEPENDENT)
    if EPILOGUE == _ADD:  # asked for with the row, so that nothing is waited for at the end
        old = tl.load(out + output, mask=ok, other=0.0)
    v, squares = _chunk(x, g0, 0, DEPTH, BLOCK, NORM)
    acc = w0.to(tl.float32) * v[None, :]
    if HELD > 1:
        v, square = _chunk(x, g1, BLOCK, DEPTH, BLOCK, NORM)
        acc += w1.to(tl.float32) * v[None, :]
        squares += square
    if HELD > 2:
        v, square = _chunk(x, g2, 2 * BLOCK, DEPTH, BLOCK, NORM)
        acc += w2.to(tl.float32) * v[None, :]
        squares += square
    if HELD > 3:
        v, square = _chunk(x, g3, 3 * BLOCK, DEPTH, BLOCK, NORM)
        acc += w3.to(tl.float32) * v[None, :]
        squares += square
    for c in tl.static_range(HELD, CHUNKS):
        w, g = _weights(base, gamma, c * BLOCK, DEPTH, BLOCK, NORM)
        v, square = _chunk(x, g, c * BLOCK, DEPTH, BLOCK, NORM)
        acc += w.to(tl.float32) * v[None, :]
        squares += square
    total = tl.sum(acc, 1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
    if HAS_BIAS:
        total += added.to(tl.float32)
    if EPILOGUE == _GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, [2, ROWS])))
        total = gated(gate, up, GELU)
        output = tile * ROWS + tl.arange(0, ROWS)
        ok = output < OUTPUTS
    if EPILOGUE == _SQUARED:
        total = squared_relu(total)
    if PLACED:
        out += tl.load(places).to(tl.int64) * OUTPUTS
    if EPILOGUE == _ADD:
        total += old.to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _row_product_kernel(
    x, weight, bias, gamma, out, places, eps, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLACED: tl.constexpr, DEPENDENT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs."""
    let_dependents_start(DEPENDENT)
    outputs_of_row(
        tl.program_id(0), x, weight, bias, gamma, out, places, eps, OUTPUTS, DEPTH, ROWS, BLOCK, HELD, NORM, EPILOGUE,
        HAS_BIAS, PLACED, DEPENDENT, GELU,
    )  # fmt: skip


def row_product(
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
    outputs //= 2 if epilogue == GATED else 1
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
        BLOCK=tiling.block,
        HELD=min(tiling.held, triton.cdiv(depth, tiling.block)),
        NORM=norm is not None,
        EPILOGUE=epilogue,
        HAS_BIAS=linear.bias is not None,
        PLACED=places is not None,
        DEPENDENT=tiling.dependent,
        GELU=activation == "gelu_tanh",
        num_warps=tiling.warps,
        **options,
    )
