"""How products and attention are cut into programs: measured on a GPU for shapes that were tried, else a default.

`measured_tilings.json` is written by `python -m benchmarks.tune.products`. A shape or a GPU that it lacks takes the
default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import triton

from runahead.runtime.kernels.triton.decode_work import AttentionPlan
from runahead.runtime.kernels.triton.gpu import LEAST_SHARED_MEMORY, current_gpu

TABLE: Final = Path(__file__).with_name("measured_tilings.json")
_INTERPRETED_PROGRAMS: Final = 8  # of attention, where there is no GPU
SPLIT_WORDS: Final = 1 << 21  # float32 numbers that the programs of a split product leave, at most
_DEPTH_MULTIPLE: Final = 64  # of every depth that the kernels for a few rows take


@dataclass(frozen=True, slots=True)
class RowTiling:
    """Of a product of one row. rows: outputs of a program. block: entries of the depth that it looks at together. held:
    such chunks that it asks for before it waits. dependent: launched programmatically."""

    rows: int
    block: int
    held: int
    warps: int
    dependent: bool = True


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a product of a few rows. rows: outputs of a program. block: of the depth, at a time. splits: of the depth,
    over programs. stages: blocks on their way at a time. held: the first block is asked for before the program waits.
    dependent: launched programmatically."""

    rows: int
    block: int
    splits: int
    stages: int
    warps: int
    held: bool = False
    dependent: bool = True


def row_tiling(outputs: int, depth: int, epilogue: str) -> RowTiling:
    """outputs: rows of the weight matrix. epilogue: the name of what follows the product."""
    found = measured_tiling(outputs, depth, 1, epilogue)
    if found is not None:
        return RowTiling(**found)
    block = min(triton.next_power_of_2(depth), 1024)
    chunks = triton.cdiv(depth, block)
    rows = 8 if outputs >= 16384 or chunks == 1 else 4
    return RowTiling(rows // 2 if epilogue == "gated" else rows, block, min(chunks, 4 if rows == 4 else 1), 4)


def rows_tiling(outputs: int, depth: int, columns: int, epilogue: str) -> Tiling:
    """columns: rows of the batch, as a program's tile has them."""
    found = measured_tiling(outputs, depth, columns, epilogue)
    if found is not None:
        return Tiling(**found)
    rows = 64 if epilogue != "gated" else 32
    block = 128 if depth % 128 == 0 else _DEPTH_MULTIPLE
    tiles = triton.cdiv(outputs // (2 if epilogue == "gated" else 1), rows)
    splits = 1
    while tiles * splits < 128 and depth % (2 * splits * block) == 0 and depth // (2 * splits) >= 512:
        splits *= 2
    taken = (rows * (2 if epilogue == "gated" else 1) + columns) * block * 2  # bytes of shared memory, a stage
    return Tiling(rows, block, splits, max(2, min(4, _shared_memory() // taken)), warps=4)


def measured_tiling(outputs: int, depth: int, columns: int, epilogue: str) -> dict[str, Any] | None:
    """What the table has for a product, or None. columns: 1 of a product of one row, otherwise as `rows_tiling`'s."""
    measured = _measured()
    # What is best for more rows is taken to be good for fewer. One row has kernels of its own.
    for wider in (1,) if columns == 1 else (columns, 2 * columns, 4 * columns, 8 * columns):
        found = measured.get(tiling_key(outputs, depth, wider, epilogue))
        if found is not None:
            return found
    return None


def _shared_memory() -> int:
    """Bytes that a program may have."""
    gpu = current_gpu()
    return LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory


def takes_depth(depth: int) -> bool:
    """Whether a product of a few rows may have this depth."""
    return depth % _DEPTH_MULTIPLE == 0


@cache
def attention_plan(rows: int, head_dim: int, device: torch.device) -> AttentionPlan:
    """Of decode launches of so many rows, the same up to the next power of two: a launch that is no bucket's runs by a
    plan that a bucket has. What is best was measured by `benchmarks.tune.attention` on an H200, at
    contexts of about 640 tokens: there the items of 8 KV heads are about as many as there are programs."""
    rows = triton.next_power_of_2(rows)
    if device.type != "cuda":
        return AttentionPlan(16, 2, _INTERPRETED_PROGRAMS, warps=1, stages=3, early=rows == 1)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wide = head_dim > 64
    if rows == 1:
        return AttentionPlan(32, 1, 4 * processors, warps=2 if wide else 1, stages=1, early=True)
    if rows <= 16:
        return AttentionPlan(32, max(rows * 3 // 4, 1), (2 if wide else 4) * processors, 2 if wide else 1, 5, False)
    tile, programs = 32 if wide else 64, 4 * processors
    tokens = 352 if rows < 40 else 2048
    return AttentionPlan(tile, triton.cdiv(tokens, tile), programs, 2, stages=5 if wide else 3, early=False)


def tiling_key(outputs: int, depth: int, columns: int, epilogue: str) -> str:
    return f"{outputs}x{depth} {epilogue} {columns}"


def _measured() -> dict[str, dict[str, Any]]:
    """By `tiling_key`. Empty where no table has been measured for this GPU, or for what it is used as."""
    gpu = current_gpu()
    return {} if gpu is None or gpu.stands_for_older else _tables().get(gpu.name, {})


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """By a GPU's name."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found
