"""A matrix that stays quantized in memory. Every format of a checkpoint becomes this one layout while it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import torch
import torch.nn.functional as functional

from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import FP8_CAPABILITY

Kind = Literal["fp8", "int8", "int4"]
_HALF: Final = 64  # columns between the two numbers of a byte, at most
_TILE: Final = 1 << 22  # numbers that are dequantized at once: 16 MiB of float32
FP8_COLUMNS: Final = 128  # that share a scale in the kernels of a GPU, with 128 rows of a matrix
MADE_GROUP: Final = 128  # columns of a group in INT4 made at load
PANEL_ROWS: Final = 8  # of INT4 on a GPU
PANEL_COLUMNS: Final = 128
_PANEL_GROUPS: Final = (32, 64)  # columns of a scale, beside multiples of PANEL_COLUMNS
_GPU_OUTPUTS: Final = 16  # of which a matrix has a multiple there
_BLOCKS_MULTIPLE: Final = 4  # of blocks along the columns, which cuBLASLt takes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in]. An element is (number - zero point) * scale in float32, rounded once to `dtype`.

    kind: fp8 is e4m3 and has no zero points. numbers: uint8 [out, in]; of int4 [out, in // 2], where byte j of every
    `half` bytes has column j of their 2 * half columns in its low bits and column half + j in its high bits. scales:
    [groups, out], float32, bfloat16 or float16. zero_points: uint8 [groups, out]; None: all are half of the range of
    the numbers. group: columns that share a scale; the last group may have fewer. in_panels: of int4, numbers are
    [out / 8, in / 128, 8, 64] in memory, in the order of `panels`; scales are [groups, out, 2], each with the bits of
    -(128 + zero point) as bfloat16 behind it. order: int64 [in], which column of the matrix each column of numbers is;
    None: they are in order. scale_rows: adjacent rows that have the same scales, of experts in FP8.
    """

    kind: Kind
    numbers: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group: int
    dtype: torch.dtype
    in_panels: bool = False
    order: torch.Tensor | None = None
    scale_rows: int = 1

    def packed(self) -> QuantizedWeight | Fp8Weight:
        """The matrix as the kernels of its device read it."""
        return self if self.numbers.device.type == "cpu" else self.for_gpu()

    def for_gpu(self) -> QuantizedWeight | Fp8Weight:
        """The matrix as the kernels of a GPU read it. In FP8 a row has one scale, or each 128 rows have one in a block
        of columns."""
        return self.panels() if self.kind == "int4" else self._in_blocks()

    def _in_blocks(self) -> Fp8Weight:
        """See `for_gpu`."""
        assert self.kind == "fp8"
        outputs, depth = self.shape
        numbers, device = self.numbers.view(torch.float8_e4m3fn), self.scales.device
        down, along = ceil_div(outputs, FP8_COLUMNS), ceil_div(depth, FP8_COLUMNS)
        padded = ceil_div(along, _BLOCKS_MULTIPLE) * _BLOCKS_MULTIPLE
        if self.is_per_channel:
            ones = _ones((down, padded), device), _ones((along, outputs), device)
            return Fp8Weight(numbers, *ones, self.scales[0].float(), self.dtype)
        of_blocks = self.scales[torch.arange(along, device=device) * FP8_COLUMNS // self.group].float()
        first = of_blocks[:, ::FP8_COLUMNS]
        assert torch.equal(first.repeat_interleave(FP8_COLUMNS, 1)[:, :outputs], of_blocks), "128 rows have one scale"
        blocks = torch.zeros((down, padded), dtype=torch.float32, device=device)
        blocks[:, :along] = first.t()
        return Fp8Weight(numbers, blocks, of_blocks, None, self.dtype)

    def experts(self, count: int) -> tuple[ExpertFp8, ...]:
        """FP8 matrices of experts, one after the other, as the kernels of a GPU read them, in one memory."""
        assert self.kind == "fp8"
        numbers = self.numbers.view(torch.float8_e4m3fn).view(count, -1, self.shape[1])
        scales = self.scales[:, :: self.scale_rows].t().float().contiguous()
        each = zip(numbers, scales.view(count, -1, scales.shape[1]), strict=True)
        return tuple(ExpertFp8(*one, self.scale_rows, self.group, self.dtype) for one in each)

    def panels(self) -> QuantizedWeight:
        """INT4 as the kernels of a GPU read it."""
        assert self.kind == "int4" and not self.in_panels and self.scales.dtype in (torch.bfloat16, torch.float16)
        outputs, depth = self.shape
        numbers = torch.empty_like(self.numbers)
        step = max(1, _TILE // depth // PANEL_ROWS) * PANEL_ROWS
        for first in range(0, outputs, step):
            rows = slice(first, min(first + step, outputs))
            # Of 128 columns: words, steps of 16, their halves, threads, pairs.
            parts = self._numbers(rows, depth).byte().view(-1, PANEL_ROWS, depth // PANEL_COLUMNS, 4, 2, 2, 4, 2)
            low, high = parts.permute(0, 2, 1, 6, 3, 7, 4, 5).unbind(-1)
            numbers[rows] = (low | high << 4).reshape(-1, depth // 2)
        zeros = torch.full_like(self.scales, 8.0) if self.zero_points is None else self.zero_points
        zeros = (-128.0 - zeros.float()).bfloat16().view(self.scales.dtype)
        scales = torch.stack((self.scales, zeros), 2)
        return replace(self, numbers=numbers, scales=scales, zero_points=None, in_panels=True)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.numbers.shape
        return outputs, 2 * width if self.kind == "int4" else width

    @property
    def half(self) -> int:
        """Columns between the two numbers of a byte of int4."""
        return half_of(self.shape[1])

    @property
    def is_per_channel(self) -> bool:
        """A row has one scale."""
        return self.scales.shape[0] == 1

    def rows(self, order: torch.Tensor) -> QuantizedWeight:
        """Some of the rows. order: int64 [n], which ones."""
        order = order.to(self.numbers.device)
        zeros = None if self.zero_points is None else self.zero_points[:, order].contiguous()
        return replace(self, numbers=self.numbers[order], scales=self.scales[:, order].contiguous(), zero_points=zeros)

    def dequantized(self) -> torch.Tensor:
        """The matrix, [out, in] of `dtype`, one tile of rows after the other."""
        outputs, depth = self.shape
        found = torch.empty((outputs, depth), dtype=self.dtype, device=self.numbers.device)
        step = max(1, _TILE // depth)
        for first in range(0, outputs, step):
            rows = slice(first, min(first + step, outputs))
            numbers = self._numbers(rows, depth)
            if self.kind != "fp8":
                numbers -= (
                    1 << _BITS[self.kind] - 1 if self.zero_points is None else self._spread(self.zero_points, rows)
                )
            found[rows] = numbers.mul_(self._spread(self.scales, rows))
        if self.order is not None:
            found = found[:, self.order.argsort()]
        return found

    def _numbers(self, rows: slice, depth: int) -> torch.Tensor:
        """Return the stored numbers, float32 [rows, in]."""
        stored = self.numbers[rows]
        if self.kind == "fp8":
            return stored.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return stored.float()
        pairs = stored.view(len(stored), -1, 1, self.half)
        return torch.cat((pairs & 15, pairs >> 4), 2).view(len(stored), depth).float()

    def _spread(self, of_groups: torch.Tensor, rows: slice) -> torch.Tensor:
        """Repeat values of groups for each column, float32 [rows, in]; [rows, 1] with one group."""
        found = of_groups[:, rows].t().float()
        return found if self.is_per_channel else found.repeat_interleave(self.group, 1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [out, in] in FP8 as the kernels of a GPU read it, multiplied in `dtype`.

    numbers: e4m3 [out, in]. blocks: float32 [out / 128, in / 128], both rounded up, the second to a multiple of 4: of
    128 rows and 128 columns, by which their sums are multiplied. by_output: the same numbers, float32 [in / 128, out].
    channels: float32 [out], by which rounded sums of all columns are multiplied; None: by nothing. Where there are
    channels, the others are 1, of one tensor for all matrices of a shape.
    """

    numbers: torch.Tensor
    blocks: torch.Tensor
    by_output: torch.Tensor
    channels: torch.Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        outputs, depth = self.numbers.shape
        return outputs, depth


@dataclass(frozen=True, slots=True)
class ExpertFp8:
    """A matrix [out, in] of an expert in FP8 as the kernels of a GPU read it, or several, [n, out, in], multiplied in
    `dtype`.

    numbers: e4m3 [..., out, in]. scales: float32 [..., out / scale_rows, in / group], the second rounded up: of
    scale_rows rows and `group` columns.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    scale_rows: int
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def dequantized(self) -> torch.Tensor:
        """Return one matrix, [out, in] of `dtype`, each number * scale in float32, rounded once."""
        scales = self.scales.repeat_interleave(self.scale_rows, 0).repeat_interleave(self.group, 1)
        return (self.numbers.float() * scales[:, : self.shape[1]]).to(self.dtype)


def form_of(weight: QuantizedWeight | Fp8Weight | ExpertFp8 | None) -> tuple[object, ...]:
    """Return what kernels are compiled and chosen for, in addition to a matrix's shape."""
    if isinstance(weight, ExpertFp8):
        return "fp8", weight.scale_rows, weight.group
    if isinstance(weight, Fp8Weight):
        return "fp8", weight.channels is None
    return () if weight is None else (weight.kind, weight.group, weight.scales.dtype, weight.order is None)


@cache
def _ones(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device=device)


_BITS: Final[dict[Kind, int]] = {"fp8": 8, "int8": 8, "int4": 4}


def half_of(depth: int) -> int:
    """Columns between the two numbers of a byte of int4, of a matrix with so many; 0: they can't lie in pairs."""
    return math.gcd(depth, 2 * _HALF) // 2


def packed_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits in pairs, as `QuantizedWeight` has them: uint8 [out, in // 2]. numbers: uint8 [out, in]."""
    outputs, depth = numbers.shape
    pairs = numbers.view(outputs, -1, 2, half_of(depth))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(outputs, depth // 2)


def quantized_to_fp8(weight: torch.Tensor) -> QuantizedWeight:
    """FP8 with a bfloat16 scale for each row, its greatest number over 448, rounded up; 1 for a row of zeros, NaN for a
    row with one. weight: [out, in] of any dtype, which the result has for its own."""
    exact = weight.abs().amax(1).float() / torch.finfo(torch.float8_e4m3fn).max
    exact = torch.where(exact == 0, 1.0, exact)  # NaN stays: the GPU's conversion makes none
    nearest = exact.bfloat16()
    scales = torch.where(nearest < exact, (nearest.view(torch.int16) + 1).view(torch.bfloat16), nearest)
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, _TILE // weight.shape[1])
    for part, into, own in zip(weight.split(step), numbers.split(step), scales.split(step), strict=True):
        into.copy_((part.float() / own.float()[:, None]).to(torch.float8_e4m3fn).view(torch.uint8))
    return QuantizedWeight("fp8", numbers, scales[None], None, weight.shape[1], weight.dtype)


def quantized_to_int4(weight: torch.Tensor) -> QuantizedWeight:
    """INT4 without zero points, each number rounded to the nearest, with a bfloat16 scale for MADE_GROUP columns: their
    greatest number over 7.5. 1 for a group of zeros, NaN for one with a NaN. weight: [out, in] of any dtype, which the
    result has for its own; numbers of `in` columns lie in pairs (`half_of`)."""
    outputs, depth = weight.shape
    groups = ceil_div(depth, MADE_GROUP)
    numbers = torch.empty((outputs, depth // 2), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((groups, outputs), dtype=torch.bfloat16, device=weight.device)
    step = max(1, _TILE // depth)
    for first in range(0, outputs, step):
        part = weight[first : first + step].float()
        padded = functional.pad(part, (0, groups * MADE_GROUP - depth)).view(len(part), groups, MADE_GROUP)
        greatest = padded.abs().amax(2)
        own = torch.where(greatest == 0, 1.0, greatest / 7.5).bfloat16()
        made = (padded / own.float()[:, :, None]).round_().clamp_(-8, 7).nan_to_num_() + 8
        numbers[first : first + step] = packed_pairs(made.view(len(part), -1)[:, :depth].byte())
        scales[:, first : first + step] = own.t()
    return QuantizedWeight("int4", numbers, scales, None, MADE_GROUP, weight.dtype)


def stays_quantized(
    kind: Kind, shape: tuple[int, int], group: int, scales: torch.dtype, dtype: torch.dtype, device: str
) -> bool:
    """Return whether kernels of the device take a matrix of this kind as it is; others are dequantized while they are
    loaded. shape: outputs and columns. group: columns that share a scale; of FP8 on a GPU 128 rows do too, if it is not
    all columns. scales: their dtype. dtype: that is served. device: the type of it."""
    outputs, depth = shape
    if device == "cpu":
        return kind != "int4" or half_of(depth) > 0
    if outputs % _GPU_OUTPUTS or depth % FP8_COLUMNS or dtype != torch.bfloat16:
        return False
    in_columns = group >= depth or not group % FP8_COLUMNS
    if kind == "int4":
        return (in_columns or group in _PANEL_GROUPS) and scales in (torch.bfloat16, torch.float16)
    return kind == "fp8" and in_columns and _knows_fp8()


def experts_stay(depth: int, group: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether kernels of the device take FP8 matrices of experts as they are. depth: columns, of which `group`
    have one scale. dtype: that is served. device: the type of it."""
    fits = depth % FP8_COLUMNS == 0 and (group >= depth or group % FP8_COLUMNS == 0)
    return device != "cpu" and dtype == torch.bfloat16 and fits and _knows_fp8()


def _knows_fp8() -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(None) >= FP8_CAPABILITY


def quantized_bytes(
    kind: Kind, outputs: int, depth: int, group: int, scale_bytes: int, device: str, *, has_zero_points: bool,
    is_ordered: bool = False,
) -> int:  # fmt: skip
    """Bytes that a `QuantizedWeight` takes, or on a GPU a `Fp8Weight`. scale_bytes: of a scale. device: the type of
    it."""
    numbers = outputs * depth * _BITS[kind] // 8
    if device != "cpu" and kind == "fp8":
        if group >= depth:
            return numbers + torch.float32.itemsize * outputs
        along = ceil_div(depth, FP8_COLUMNS)
        padded = ceil_div(along, _BLOCKS_MULTIPLE) * _BLOCKS_MULTIPLE
        return numbers + torch.float32.itemsize * (ceil_div(outputs, FP8_COLUMNS) * padded + along * outputs)
    if device != "cpu":
        scale_bytes, has_zero_points = 2 * scale_bytes, False
    groups = ceil_div(depth, group)
    return numbers + outputs * groups * (scale_bytes + has_zero_points) + is_ordered * depth * torch.int64.itemsize
