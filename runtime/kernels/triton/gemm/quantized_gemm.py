"""Products of rows with a quantized matrix, which is dequantized in registers, one tile after the other.

One float32 accumulator an output walks the depth upwards, whatever the tiling and the number of rows. A matrix with one
scale for each output is multiplied without it (its numbers are exact in bfloat16), and the scale is applied to the sum;
one with groups is dequantized to bfloat16, so that the sums are those of the dequantized matrix.

For many rows the whole matrix is dequantized first and the vendor's library computes the product, where it was found to
have the same bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.quantized_weight import QuantizedWeight
from runahead.runtime.kernels.triton.gemm.cublaslt import exact_product
from runahead.runtime.kernels.triton.gemm.cublaslt_choice import Chain
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.kernels.triton.gpu.pdl import (
    dependent_launch_works,
    let_dependents_start,
    wait_for_predecessors,
)
from runahead.runtime.rounding import ceil_div

_KINDS: Final = {"fp8": 0, "int8": 1, "int4": 2}
_FP8, _INT4 = tl.constexpr(_KINDS["fp8"]), tl.constexpr(_KINDS["int4"])
# What a kernel runs on, the last a GPU that converts e4m3.
_INTERPRETER, _GPU, _CONVERTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FP8_IN_HARDWARE: Final = (8, 9)  # the first compute capability that converts e4m3
_MANY_ROWS: Final = 1024  # from here on the matrix is dequantized first: the reading of it weighs little
_LEAST_COLUMNS: Final = 8
_SCALED_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    """rows: outputs of a program. columns: rows of the batch that it has, at most. block: of the depth, at a time; of
    int4 bytes, as many as `QuantizedWeight.half`. stages: blocks on their way at a time."""

    rows: int
    columns: int
    block: int
    stages: int
    warps: int


@triton.jit
def _numbers(stored, KIND: tl.constexpr, TARGET: tl.constexpr):
    """Stored bytes as float32 or bfloat16 numbers, exactly. stored: uint8; of int4 one number each."""
    if KIND != _FP8:
        found = stored.to(tl.float32)
    elif TARGET == _CONVERTS:
        found = stored.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:  # the bits of e4m3 as float32's, whose exponent is then too small by 127 - 7
        bits = (stored & 128).to(tl.uint32) << 24 | (stored & 127).to(tl.uint32) << 20
        found = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
    return found


@triton.jit
def _of_groups(of_groups, row, first, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """What the groups of BLOCK columns from `first` on have: float32 [ROWS, 1] or [ROWS, BLOCK]."""
    if GROUP % BLOCK == 0:
        found = tl.load(of_groups + first // GROUP * OUTPUTS + row)[:, None]
    else:
        group = (first + tl.arange(0, BLOCK)) // GROUP
        found = tl.load(of_groups + group[None, :] * OUTPUTS + row[:, None])
    return found.to(tl.float32)


@triton.jit
def _dequantized(
    stored, scales, zero_points, row, first, KIND: tl.constexpr, TARGET: tl.constexpr, OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """bfloat16 [ROWS, BLOCK], of columns from `first` on; with one group, without its scale."""
    found = _numbers(stored, KIND, TARGET)
    if KIND != _FP8:
        if ZEROS:
            found -= _of_groups(zero_points, row, first, OUTPUTS, GROUP, BLOCK)
        else:
            found -= 8.0 if KIND == _INT4 else 128.0
    if GROUPS > 1:
        found = found.to(tl.float32) * _of_groups(scales, row, first, OUTPUTS, GROUP, BLOCK)
    made = found.to(tl.bfloat16)
    if TARGET != _INTERPRETER:  # or the compiler takes 8 bits for the operand's width and adds columns in another order
        made = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [made], dtype=tl.bfloat16, is_pure=False, pack=2)
    return made


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_product_kernel(
    x, numbers, scales, zero_points, out, num_rows,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, TARGET: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs and COLUMNS rows of the batch."""
    let_dependents_start(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, OUTPUTS - 1)
    k = tl.arange(0, BLOCK)
    BYTES: tl.constexpr = DEPTH // 2 if KIND == _INT4 else DEPTH
    at = numbers + row.to(tl.int64)[:, None] * BYTES + k[None, :]
    x_at = x + column.to(tl.int64)[None, :] * DEPTH + k[:, None]
    ok = (column < num_rows)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait_for_predecessors(DEPENDENT)
    if KIND == _INT4:  # BLOCK bytes are 2 * BLOCK columns, those of the low bits first: the depth goes upwards
        for begin in tl.range(0, BYTES, BLOCK, num_stages=STAGES):
            stored = tl.load(at + begin)
            first = 2 * begin
            low = _dequantized(
                stored & 15,
                scales,
                zero_points,
                row,
                first,
                KIND,
                TARGET,
                OUTPUTS,
                GROUPS,
                GROUP,
                BLOCK,
                ZEROS,
            )
            acc = tl.dot(low, tl.load(x_at + first, mask=ok, other=0.0), acc)
            high = _dequantized(
                stored >> 4, scales, zero_points, row, first + BLOCK, KIND, TARGET, OUTPUTS, GROUPS, GROUP, BLOCK,
                ZEROS,
            )  # fmt: skip
            acc = tl.dot(high, tl.load(x_at + first + BLOCK, mask=ok, other=0.0), acc)
    else:
        for begin in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
            w = _dequantized(
                tl.load(at + begin), scales, zero_points, row, begin, KIND, TARGET, OUTPUTS, GROUPS, GROUP, BLOCK,
                ZEROS,
            )  # fmt: skip
            acc = tl.dot(w, tl.load(x_at + begin, mask=ok, other=0.0), acc)
    if GROUPS == 1:
        acc *= tl.load(scales + row).to(tl.float32)[:, None]
    to = out + column.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=ok & (output < OUTPUTS)[:, None])


@triton.jit
def _dequantize_kernel(
    numbers, scales, zero_points, out, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, TARGET: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """One program for ROWS outputs and BLOCK bytes of each."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, OUTPUTS - 1)
    begin = tl.program_id(1) * BLOCK
    k = tl.arange(0, BLOCK)
    ok = (output < OUTPUTS)[:, None]
    BYTES: tl.constexpr = DEPTH // 2 if KIND == _INT4 else DEPTH
    stored = tl.load(numbers + row.to(tl.int64)[:, None] * BYTES + begin + k[None, :])
    to = out + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    if KIND == _INT4:
        first = 2 * begin
        low = _dequantized(
            stored & 15, scales, zero_points, row, first, KIND, TARGET, OUTPUTS, GROUPS, GROUP, BLOCK, ZEROS
        )
        tl.store(to + first, low, mask=ok)
        high = _dequantized(
            stored >> 4,
            scales,
            zero_points,
            row,
            first + BLOCK,
            KIND,
            TARGET,
            OUTPUTS,
            GROUPS,
            GROUP,
            BLOCK,
            ZEROS,
        )
        tl.store(to + first + BLOCK, high, mask=ok)
    else:
        made = _dequantized(stored, scales, zero_points, row, begin, KIND, TARGET, OUTPUTS, GROUPS, GROUP, BLOCK, ZEROS)
        tl.store(to + begin, made, mask=ok)


@triton.jit
def _scale_kernel(sums, scales, out, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < OUTPUTS
    at = tl.program_id(0).to(tl.int64) * OUTPUTS + i
    found = tl.load(sums + at, mask=ok, other=0.0) * tl.load(scales + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=ok)


def quantized_tiling(weight: QuantizedWeight, num_rows: int) -> QuantizedTiling:
    """How a product of so many rows is cut. No bit depends on it. The outputs and warps of a program are the fastest of
    a few that were timed on an H200 for the products of an 8B model."""
    outputs, depth = weight.shape
    columns = max(_LEAST_COLUMNS, min(128, triton.next_power_of_2(num_rows)))
    few = columns <= 32
    rows, block, warps = (16, 128, 2) if few and outputs <= 4096 else (64, 128 if few else 64, 4)
    if weight.kind == "int4":
        block = weight.half  # with another one, columns would not be added in ascending order
    elif not weight.is_per_channel:
        block = min(block, weight.group & -weight.group)
    block = min(block, depth & -depth)
    gpu = current_gpu()
    room = LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory
    while rows > 16 and _stages_in(room, weight, rows, columns, block) < 2:
        rows, warps = rows // 2, max(warps // 2, 1)
    return QuantizedTiling(rows, columns, block, min(4, _stages_in(room, weight, rows, columns, block)), warps)


def _stages_in(room: int, weight: QuantizedWeight, rows: int, columns: int, block: int) -> int:
    """Blocks that may be on their way in so many bytes of shared memory, beside one in 16 bits."""
    tiles = 2 if weight.kind == "int4" else 1  # of columns, in a block of bytes
    size = rows * block + tiles * block * columns * 2
    if not weight.is_per_channel and weight.group % block:
        size += tiles * rows * block * (weight.scales.itemsize + (weight.zero_points is not None))
    return (room - 2 * tiles * rows * block) // size


def quantized_sums(
    x: torch.Tensor,
    weight: QuantizedWeight,
    chain: Chain,
    tiling: QuantizedTiling | None = None,
    *,
    dependent: bool = False,
) -> torch.Tensor:
    """x @ weight.T, each value the sum of one float32 accumulator over the depth, rounded once. x: bfloat16 [T, in],
    contiguous. chain: as `exact_product` has it. tiling: None takes the one for so many rows. dependent: launched
    programmatically. Returns bfloat16 [T, outputs]."""
    rows, (outputs, _) = x.shape[0], weight.shape
    if tiling is None and rows >= _MANY_ROWS:
        return _sums_of_many(x, weight, chain)
    out = x.new_empty((rows, outputs))
    tiling = quantized_tiling(weight, rows) if tiling is None else tiling
    assert weight.kind != "int4" or tiling.block == weight.half
    options: dict[str, Any] = {"launch_pdl": True} if dependent and dependent_launch_works() else {}
    _quantized_product_kernel[(ceil_div(rows, tiling.columns), ceil_div(outputs, tiling.rows))](
        x,
        *_tensors(weight),
        out,
        rows,
        COLUMNS=tiling.columns,
        ROWS=tiling.rows,
        BLOCK=tiling.block,
        STAGES=tiling.stages,
        DEPENDENT=bool(options),
        num_warps=tiling.warps,
        **_form(weight),
        **options,
    )
    return out


def _sums_of_many(x: torch.Tensor, weight: QuantizedWeight, chain: Chain) -> torch.Tensor:
    """As `quantized_sums`: the matrix is dequantized first."""
    dtype = torch.float32 if weight.is_per_channel else x.dtype
    sums = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    exact_product(x, dequantized_in_16_bits(weight), sums, chain)
    if not weight.is_per_channel:
        return sums
    out = x.new_empty(sums.shape)
    _scale_kernel[(x.shape[0], ceil_div(sums.shape[1], _SCALED_BLOCK))](
        sums, weight.scales, out, OUTPUTS=sums.shape[1], BLOCK=_SCALED_BLOCK
    )
    return out


def dequantized_in_16_bits(weight: QuantizedWeight) -> torch.Tensor:
    """The matrix that a product multiplies with, bfloat16 [out, in]: with one scale for each output, without it."""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=torch.bfloat16, device=weight.numbers.device)
    tiling = quantized_tiling(weight, 1)
    width = weight.numbers.shape[1]
    _dequantize_kernel[(ceil_div(outputs, 32), width // tiling.block)](
        *_tensors(weight), out, ROWS=32, BLOCK=tiling.block, num_warps=4, **_form(weight)
    )
    return out


def _tensors(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = weight.scales if weight.zero_points is None else weight.zero_points
    return weight.numbers, weight.scales, zeros


def _form(weight: QuantizedWeight) -> dict[str, Any]:
    """What the kernels are compiled for, of a matrix."""
    outputs, depth = weight.shape
    gpu, target = current_gpu(), _INTERPRETER.value
    if gpu is not None:
        target = (_CONVERTS if gpu.capability >= _FP8_IN_HARDWARE else _GPU).value
    return {
        "OUTPUTS": outputs,
        "DEPTH": depth,
        "KIND": _KINDS[weight.kind],
        "TARGET": target,
        "GROUPS": weight.scales.shape[0],
        "GROUP": weight.group,
        "ZEROS": weight.zero_points is not None,
        "enable_fp_fusion": False,
    }
