"""Tilings of products and attention. Products of known shapes were measured on a GPU; others take a default.

`measured_tilings.json` is the package's table. A shape or a kind of GPU (`Gpu.measured_as`) that
it lacks takes the default. Tilings that `runahead tune` has found come before both (`tuned_tilings`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import triton

from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.rounding import ceil_div

TABLE: Final = Path(__file__).with_name("measured_tilings.json")
_INTERPRETED_PROGRAMS: Final = 8  # of attention, where there is no GPU
SPLIT_WORDS: Final = 1 << 21  # float32 numbers that the programs of a split product leave, at most
_MEASURED_ITEMSIZE: Final = 2  # bytes of a weight where the table was measured
_MOST_MEASURED: Final = 512  # rows of the batch in the table, at most
_DEPTH_MULTIPLE: Final = 64  # of the depth, that a block has at least
LEAST_COLUMNS: Final = 8  # rows of the batch that the matrix units take
_TILE: Final = 64  # rows of the weights that a program has by default
_BUSY: Final = 128  # programs that keep a GPU's memory busy
_MANY_OUTPUTS: Final = 1 << 16  # of a vocabulary, say
_FEW_COLUMNS: Final = 64  # up to so many rows of the batch, a product waits for the weights
_MOST_COLUMNS: Final = 128  # rows of the batch that a program has by default, at most
_ONE_SUM: Final = 1 << 23  # numbers of the weights
_FULL: Final = 0.93  # of the programs' time, with which one sum of many rows is faster than by the vendor's library
_WIDE: Final = 1.05  # how much faster wide tiles are
_LEAST_SEGMENT: Final = 512  # of the depth
_MOST_SEGMENTS: Final = 8
_WHOLE_SEGMENT: Final = 512  # of the depth, of which 16 rows of the weights fit into registers
MOST_DIRECT: Final = 16  # rows of the batch that a product with direct weights takes
_EXACT_TILE: Final = 64  # tokens of a tile of attention
_EXACT_GROUP: Final = 16  # parts of a group of attention
_LARGEST_HEAD: Final = 128  # numbers of a head, of which a tile fits into registers
_MANY_HEADS: Final = 4  # of a KV head
_EARLY_ROWS, _LONE_ROWS = 8, 2  # up to which attention requests tiles before its query token
_AT_A_TIME: Final = 2  # programs of attention whose registers a processor has
_FIVE_STAGES: Final = 74 << 10  # bytes of shared memory of such a program


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of a product on the matrix units. rows: outputs of a program. block: of the depth, at a time. splits:
    parts of the depth; a row's bits depend on it alone, and products of several parts have blocks of `chain_of`.
    stages: blocks on their way at a time. held: blocks that it loads before it waits. dependent: launched
    programmatically. columns: rows of the batch that a program has, at most. spread: each part has a separate
    program; else one program computes them one after the other.

    direct: for up to 16 rows: each part is a warp of one program, into whose registers the weights go straight
    (`gemm/warp_split_k.py`). More warps than parts divide the program's outputs."""

    rows: int
    block: int
    splits: int
    stages: int
    warps: int
    held: int = 0
    dependent: bool = True
    columns: int = 64
    spread: bool = True
    direct: bool = False


def rows_in_table(num_rows: int) -> int:
    """Return the number of rows in the table's key: the next power of two, at least 2."""
    return max(1 << (num_rows - 1).bit_length(), 2)


def rows_tiling(outputs: int, depth: int, columns: int, epilogue: str, itemsize: int = 2) -> Tiling:
    """Return the tiling of a product of few rows: the measured one, or a default. outputs: rows of the weight matrix.
    columns: rows of the batch, as the table names them (`rows_in_table`). epilogue: the name of what follows the
    product. itemsize: bytes of a weight; the table is for 2."""
    found = measured_tiling(outputs, depth, columns, epilogue, itemsize)
    if found is not None:
        assert found["splits"] == segments(outputs, depth), "the table has other segments"
        return Tiling(**found)
    halves, splits = 2 if epilogue == "gated" else 1, segments(outputs, depth)
    if itemsize > _MEASURED_ITEMSIZE:
        return _by_multiply_adds(depth, columns, halves, splits)
    return default_tiling(outputs, depth, max(columns, LEAST_COLUMNS), halves, splits)


def default_tiling(outputs: int, depth: int, columns: int, halves: int, splits: int) -> Tiling:
    """Return the tiling of a product that was not measured. halves: 2 for a gate and its factor, else 1. splits:
    segments of the depth."""
    if splits > 1 and columns <= LEAST_COLUMNS:
        return _direct(depth, halves, splits)
    few, most = columns <= _FEW_COLUMNS, min(columns, _MOST_COLUMNS)
    if splits == 1 and columns <= LEAST_COLUMNS and outputs <= _MANY_OUTPUTS:
        # Programs of one or two warps, each with its outputs' whole depth: enough of them to keep the memory busy.
        tile = 32 if halves == 2 or outputs > 128 * _TILE else 16
        block = max(size for size in (64, 128, 256) if depth % size == 0 or size == _DEPTH_MULTIPLE)
        stages = min(5 if outputs <= 128 * _TILE else 3, _shared_memory() // ((tile + most) * block * 2))
        return Tiling(tile // halves, block, 1, stages, warps=tile // 16, held=1, columns=most)
    tile = 2 * _TILE if outputs * columns >= _BUSY * 2 * _TILE * _MOST_COLUMNS else _TILE
    block = 128 if few and depth % 128 == 0 else _DEPTH_MULTIPLE
    programs = ceil_div(outputs, tile) * ceil_div(columns, most)
    if splits > 1:
        block = chain_of(depth, splits)
        if 2 * (tile + most) * block * 2 > _shared_memory():
            most = min(most, _FEW_COLUMNS)
    elif depth < 2 * block:
        block = _DEPTH_MULTIPLE
    taken = (tile + most) * block * 2  # bytes of shared memory, a stage
    stages = max(2, min(4, _shared_memory() // taken))
    return Tiling(
        rows=tile // halves,
        block=block,
        splits=splits,
        stages=stages,
        warps=4 if few else 8,
        dependent=few,
        columns=most,
        spread=few or (programs < _BUSY and outputs * columns * splits <= SPLIT_WORDS),
    )


def _by_multiply_adds(depth: int, columns: int, halves: int, splits: int) -> Tiling:
    """Return the tiling of a float32 product, which has no matrix units: its tiles fit registers."""
    block = chain_of(depth, splits) or _TILE // 2
    most = min(max(columns, LEAST_COLUMNS), _TILE // 2)
    return Tiling(_TILE // 2 // halves, block, splits, 1, warps=4, dependent=False, columns=most, spread=False)


def _direct(depth: int, halves: int, splits: int) -> Tiling:
    """One warp for each segment and 16 of the weights' rows, or 8 where a segment of 16 does not fit into registers.
    Few registers matter more than many programs: beside them the next kernel requests its weights."""
    segment = depth // splits
    tile = 16 if halves == 2 or segment <= _WHOLE_SEGMENT else 8
    block = max(size for size in (64, 128, 256, _WHOLE_SEGMENT) if segment % size == 0)
    return Tiling(tile // halves, block, splits, 1, splits, direct=True)


def measured_tiling(outputs: int, depth: int, columns: int, epilogue: str, itemsize: int = 2) -> dict[str, Any] | None:
    """Return the table's entry for a product, or None: see `rows_tiling`. All entries of one product have the same
    number of parts."""
    # What is best for more rows is taken to be good for fewer, but up to LEAST_COLUMNS the default has another form.
    most = LEAST_COLUMNS if columns <= LEAST_COLUMNS else _MOST_MEASURED
    for factor in (1, 2, 4, 8, 16, 32) if itemsize == _MEASURED_ITEMSIZE else ():
        if factor * columns > most:
            break
        found = measured_entry(tiling_key(outputs, depth, factor * columns, epilogue))
        if found is not None:
            return found
    return None


def _shared_memory() -> int:
    """Bytes that a program may have."""
    gpu = current_gpu()
    return LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory


def segments(outputs: int, depth: int) -> int:
    """Into how many equal segments of the depth the kernels cut a product, by its shape alone; outputs: rows of the
    weights. Each segment is one accumulator, and the segments are added in ascending order.

    A product of many weights is one segment, as in the vendor's library without split-K. A smaller one would leave most
    of the GPU idle with few rows.
    """
    if outputs * depth >= _ONE_SUM:
        return 1
    count = 1
    while (
        outputs * count < _BUSY * 64
        and depth % (2 * count * _DEPTH_MULTIPLE) == 0
        and depth // (2 * count) >= _LEAST_SEGMENT
        and count < _MOST_SEGMENTS
    ):
        count *= 2
    return count


def chain_of(depth: int, splits: int) -> int:
    """Return the length of a chain: columns of a segment that are summed separately, in ascending steps of 16. The
    chains' sums are added in ascending order, so the matrix units compute several at a time. 0: a product of one
    segment is one sum."""
    return (
        0
        if splits == 1
        else max(size for size in (_DEPTH_MULTIPLE, 2 * _DEPTH_MULTIPLE) if depth // splits % size == 0)
    )


def is_one_sum(outputs: int, depth: int) -> bool:
    """Return whether a product is one segment, and large enough for the vendor's library where there are many rows."""
    return outputs * depth >= _ONE_SUM


def has_many_rows_kernel(rows: int, outputs: int, depth: int) -> bool:
    """Return whether `chains_hopper.py` computes a product of many rows: on compute capability 9.0, in segments or,
    where tiles fill the GPU, as one sum of at most as many inputs as outputs; elsewhere the vendor's library is as
    fast. No bit depends on it."""
    gpu = current_gpu()
    if gpu is None or gpu.capability != (9, 0) or outputs % 16 or depth % _DEPTH_MULTIPLE:
        return False
    if segments(outputs, depth) > 1:
        return True
    return depth <= outputs and one_sum_tile(rows, outputs, max(gpu.multiprocessors, 1))[1] >= _FULL


def one_sum_tile(rows: int, outputs: int, programs: int) -> tuple[int, float]:
    """Return a tile's weights for a product of one sum in tiles of 128 rows, and what fraction of the programs' time
    goes to rows and outputs that exist. outputs: rows of the weights."""

    def busy(weights: int) -> float:
        waves = ceil_div(ceil_div(rows, 128) * ceil_div(outputs, weights), programs)
        return rows * outputs / (waves * programs * 128 * weights)

    wide, narrow = busy(256), busy(192)
    return (256, wide) if _WIDE * wide >= narrow else (192, narrow)


@cache
def attention_plan(
    rows: int, head_dim: int, device: torch.device, kv_heads: int = 1, shared_by: int = 1, itemsize: int = 2
) -> AttentionPlan:
    """Return the plan of decode attention for this many rows, the same up to the next power of two, so that a launch
    without a bucket has a bucket's plan. Tile, warps and group, on which a row's bits depend, are the same for
    every number of rows. kv_heads, shared_by: KV heads, and query heads of each, the most of all layers. itemsize:
    bytes of a number of keys and values. What is best was measured on an H200 in 16 bits."""
    rows = triton.next_power_of_2(rows)
    if device.type != "cuda":
        room = _INTERPRETED_PROGRAMS // kv_heads
        return AttentionPlan(16, 4, _INTERPRETED_PROGRAMS, 1, stages=3, early=rows == 1, room=room)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    room = _AT_A_TIME * processors // kv_heads
    # Tiles of float32 are twice as large: one at a time fits into the memory of every GPU.
    halves = itemsize <= _MEASURED_ITEMSIZE
    # With more rows early tiles disturb the product before; where few query heads share a tile, with few rows too.
    early_rows = _EARLY_ROWS if shared_by >= _MANY_HEADS else _LONE_ROWS
    early = halves and head_dim <= _LARGEST_HEAD and rows <= early_rows
    few_stages = rows <= _LONE_ROWS or _shared_memory() < _AT_A_TIME * _FIVE_STAGES
    stages = 1 if not halves else 2 if head_dim > _LARGEST_HEAD else 3 if few_stages else 5
    programs = (_AT_A_TIME if rows <= room else 4) * processors
    return AttentionPlan(_EXACT_TILE, _EXACT_GROUP, programs, 4, stages, early, room)


def measured_entry(key: str) -> dict[str, Any] | None:
    """Return the table's entry under this key for the current kind of GPU, or None."""
    return tuned().get(key) or _measured().get(key)


def tiling_key(outputs: int, depth: int, columns: int, epilogue: str) -> str:
    """Return a table key. "exact" distinguishes these tilings from older files, whose products had another order."""
    return f"{outputs}x{depth} {epilogue} {columns} exact"


def _measured() -> dict[str, dict[str, Any]]:
    """Return measured entries by `tiling_key` and `ExpertProduct.key`; empty if the current kind of GPU has none."""
    name = measured_gpu()
    return {} if name is None else _tables()[name]


@cache
def tuned() -> dict[str, dict[str, Any]]:
    """Return the entries of `runahead tune` for this GPU that this process has read (`tuned_tilings`)."""
    return {}


def measured_gpu() -> str | None:
    """The GPU of the table whose tilings are this one's. None where there is none."""
    gpu = current_gpu()
    return None if gpu is None else gpu.measured_as(_tables())


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Read the package's table: entries by GPU name."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found
