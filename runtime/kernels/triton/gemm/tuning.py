"""How products and attention are cut into programs: measured on a GPU for shapes that were tried, else a default.

`measured_tilings.json` is the package's table. A shape that it lacks takes the default, and so does a GPU unless one of
its kind is there (`Gpu.measured_as`). What `runahead tune` has found comes before both (`tuned_tilings`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import triton

from runahead.runtime.kernels.layer_products import DEPTH_MULTIPLE, products_of
from runahead.runtime.kernels.layers import AttentionShape, FeedForward, Fuse, Layer, Mixer
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, current_gpu
from runahead.runtime.rounding import ceil_div

TABLE: Final = Path(__file__).with_name("measured_tilings.json")
_INTERPRETED_PROGRAMS: Final = 8  # of attention, where there is no GPU
SPLIT_WORDS: Final = 1 << 21  # float32 numbers that the programs of a split product leave, at most
LEAST_COLUMNS: Final = 8  # rows of the batch that the matrix units take
_TILE: Final = 64  # rows of the weights that a program has by default
_BUSY: Final = 128  # programs that keep a GPU's memory busy
_MANY_OUTPUTS: Final = 1 << 16  # of a vocabulary, say
_FEW_COLUMNS: Final = 64  # up to so many rows of the batch, a product waits for the weights
_MOST_COLUMNS: Final = 128  # rows of the batch that a program has by default, at most
_ONE_SUM: Final = 1 << 23  # numbers of the weights
_LEAST_SEGMENT: Final = 512  # of the depth
_MOST_SEGMENTS: Final = 8
_WHOLE_SEGMENT: Final = 512  # of the depth, of which 16 rows of the weights fit into registers
MOST_DIRECT: Final = 16  # rows of the batch that a product with direct weights takes
_EXACT_TILE: Final = 64  # tokens of a tile of exact attention
_EXACT_TILES: Final = 2  # of a part of exact attention
_LARGEST_HEAD: Final = 128  # numbers of a head, of which a part's tiles fit into registers
_EXACT_GROUP: Final = 8  # parts of a group of exact attention
_FEW_ROWS: Final = 16  # with at most this many rows, each part is an item of exact attention
_MANY_HEADS: Final = 4  # of a KV head


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
    """Of a product on the matrix units. rows: outputs of a program. block: of the depth, at a time. splits: parts of
    the depth; a row's bits depend on it alone, and exact products of several parts have blocks of `chain_of`. stages:
    blocks on their way at a time. held: blocks that it asks for before it waits. dependent: launched
    programmatically. columns: rows of the batch that a program has, at most. spread: every part has a program of its
    own; else one program takes one after the other.

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
    """By how many rows of the batch the table names what is found for so many, where several go through a product
    together: the next power of two. The matrix units take LEAST_COLUMNS, but beside fewer other kernels run."""
    return max(1 << (num_rows - 1).bit_length(), 2)


def row_tiling(outputs: int, depth: int, epilogue: str) -> RowTiling:
    """outputs: rows of the weight matrix. epilogue: the name of what follows the product."""
    found = measured_tiling(outputs, depth, 1, epilogue)
    if found is not None:
        return RowTiling(**found)
    block = min(triton.next_power_of_2(depth), 1024)
    chunks = triton.cdiv(depth, block)
    rows = 8 if outputs >= 16384 or chunks == 1 else 4
    return RowTiling(rows // 2 if epilogue == "gated" else rows, block, min(chunks, 4 if rows == 4 else 1), 4)


def rows_tiling(outputs: int, depth: int, columns: int, epilogue: str, exact: bool = False) -> Tiling:
    """columns: rows of the batch, as the table names them (`rows_in_table`). exact: the depth has as many parts for
    every number of rows."""
    found = measured_tiling(outputs, depth, columns, epilogue, exact)
    if found is not None:
        assert not exact or found["splits"] == segments(outputs, depth), "the table has other segments"
        return Tiling(**found)
    return default_tiling(outputs, depth, max(columns, LEAST_COLUMNS), epilogue, segments(outputs, depth) * exact)


def default_tiling(outputs: int, depth: int, columns: int, epilogue: str, splits: int) -> Tiling:
    """splits: what it must be; 0: as many as keep the GPU busy."""
    halves, required = 2 if epilogue == "gated" else 1, splits
    if splits > 1 and columns <= LEAST_COLUMNS:
        return _direct(depth, halves, splits)
    few, most = columns <= _FEW_COLUMNS, min(columns, _MOST_COLUMNS)
    if splits == 1 and columns <= LEAST_COLUMNS and outputs <= _MANY_OUTPUTS:
        # Programs of one or two warps, each with its outputs' whole depth: enough of them to keep the memory busy.
        tile = 32 if halves == 2 or outputs > 128 * _TILE else 16
        block = max(size for size in (64, 128, 256) if depth % size == 0)
        stages = 5 if outputs <= 128 * _TILE else 3
        return Tiling(tile // halves, block, 1, stages, warps=tile // 16, held=1, columns=most)
    tile = 2 * _TILE if outputs * columns >= _BUSY * 2 * _TILE * _MOST_COLUMNS else _TILE
    block = 128 if few and depth % 128 == 0 else DEPTH_MULTIPLE
    programs = ceil_div(outputs, tile) * ceil_div(columns, most)
    if not splits:
        splits = 1
        while programs * splits < _BUSY and depth % (2 * splits * block) == 0 and depth // (2 * splits) >= 512:
            splits *= 2
    if required > 1:
        block = chain_of(depth, splits)
        if 2 * (tile + most) * block * 2 > _shared_memory():
            most = min(most, _FEW_COLUMNS)
    elif depth % (splits * block) or depth // splits < 2 * block:
        block = DEPTH_MULTIPLE  # a part is several blocks where it can be: see `small_batch_gemm.py`
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


def _direct(depth: int, halves: int, splits: int) -> Tiling:
    """One warp for each segment and 16 of the weights' rows, or 8 where a segment of 16 does not fit into registers.
    Few registers matter more than many programs: beside them the next kernel requests its weights."""
    segment = depth // splits
    tile = 16 if halves == 2 or segment <= _WHOLE_SEGMENT else 8
    block = max(size for size in (64, 128, 256, _WHOLE_SEGMENT) if segment % size == 0)
    return Tiling(tile // halves, block, splits, 1, splits, direct=True)


def measured_tiling(
    outputs: int, depth: int, columns: int, epilogue: str, exact: bool = False
) -> dict[str, Any] | None:
    """What the table has for a product, or None. columns: 1 of a product of one row, otherwise as `rows_tiling`'s.
    exact: as `rows_tiling`'s; all entries of one product have the same number of parts."""
    # What is best for more rows is taken to be good for fewer. One row has kernels of its own.
    for factor in (1,) if columns == 1 else (1, 2, 4, 8, 16, 32):
        found = measured_entry(tiling_key(outputs, depth, factor * columns, epilogue, exact))
        if found is not None:
            return found
    return None


def _shared_memory() -> int:
    """Bytes that a program may have."""
    gpu = current_gpu()
    return LEAST_SHARED_MEMORY if gpu is None else gpu.shared_memory


def segments(outputs: int, depth: int) -> int:
    """Into how many equal segments of the depth the exact kernels cut a product, by its shape alone; outputs: rows of
    the weights. Each segment is one accumulator, and the segments are added in ascending order.

    A product of many weights is one segment, as in the vendor's library without split-K. A smaller one would leave most
    of the GPU idle with few rows.
    """
    if outputs * depth >= _ONE_SUM:
        return 1
    count = 1
    while (
        outputs * count < _BUSY * 64
        and depth % (2 * count * DEPTH_MULTIPLE) == 0
        and depth // (2 * count) >= _LEAST_SEGMENT
        and count < _MOST_SEGMENTS
    ):
        count *= 2
    return count


def chain_of(depth: int, splits: int) -> int:
    """How many entries of a segment the exact kernels sum by themselves, in ascending steps of 16; these sums are added
    in ascending order. So the matrix units compute several at a time. 0: a product of one segment is one sum."""
    return (
        0 if splits == 1 else max(size for size in (DEPTH_MULTIPLE, 2 * DEPTH_MULTIPLE) if depth // splits % size == 0)
    )


def is_one_sum(outputs: int, depth: int) -> bool:
    """Whether a product is one segment, and large enough for the vendor's library where there are many rows."""
    return outputs * depth >= _ONE_SUM


def has_chains_of_many_rows(outputs: int, depth: int) -> bool:
    """Whether `chains_hopper.py` computes an exact product of many rows: of several segments, on compute capability
    9.0."""
    gpu = current_gpu()
    return gpu is not None and gpu.capability == (9, 0) and segments(outputs, depth) > 1 and outputs % 8 == 0


def takes_depth(depth: int) -> bool:
    """Whether a product of a few rows may have this depth."""
    return depth % DEPTH_MULTIPLE == 0


def takes_products_of(part: Layer | Mixer | FeedForward | Fuse) -> bool:
    """Whether all its products may be those of a few rows, the experts' own among them. Where one may not, in whatever
    layer, none of the model's is."""
    return all(takes_depth(linear.weight.shape[1]) for linear in products_of(part))


@cache
def attention_plan(
    rows: int, head_dim: int, device: torch.device, exact: bool = False, group: int = 1
) -> AttentionPlan:
    """Of decode launches of so many rows, the same up to the next power of two: a launch that is no bucket's runs by a
    plan that a bucket has. What is best was measured on an H200, at
    contexts of about 640 tokens: there the items of 8 KV heads are about as many as there are programs. What the table
    has, `measured_plan`, comes first. exact: tile, chunk, warps and group, on which a row's bits depend,
    are the same for every number of rows. group: query heads of a KV head, the most of all layers."""
    rows = triton.next_power_of_2(rows)
    if device.type != "cuda":
        return AttentionPlan(
            16, 2, _INTERPRETED_PROGRAMS, 1, stages=3, early=rows == 1, exact=exact, group=2 if exact else 1,
            grouped=exact and rows > 1,
        )  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wide = head_dim > 64
    if exact:
        few, many_heads = rows <= _FEW_ROWS, group >= _MANY_HEADS
        # A program that holds a part leaves no registers to the next product. Where many heads share keys, that costs
        # more than loading them early wins.
        early = head_dim <= _LARGEST_HEAD and ((few and not many_heads) or (rows == 1 and not wide))
        stages = 1 if early else 2 if rows <= 2 or head_dim > _LARGEST_HEAD else 3 if few else 5
        programs = (2 if early and rows == 1 else 3 if few else 4) * processors
        return AttentionPlan(
            _EXACT_TILE, _EXACT_TILES, programs, 4, stages, early, exact=True, group=_EXACT_GROUP, grouped=not few
        )
    if rows == 1:
        tile, warps, per = (64, 4, 3) if wide else (32, 1, 4)
        return AttentionPlan(tile, 1, per * processors, warps, stages=1, early=True)
    if rows == 16 and wide:
        return AttentionPlan(32, 6, 6 * processors, 2, stages=4, early=False)
    if rows < 16 and wide:
        return AttentionPlan(32, max(rows // 2, 1), 4 * processors, 2, stages=5, early=False)
    if rows <= 16:
        return AttentionPlan(32, max(rows * 3 // 4, 1), 4 * processors, 1, 5, False)
    tile, per = 32 if wide else 64, 6 if wide and rows > 32 else 4
    # Rows of many lengths: with whole rows of up to 2,048 tokens the longest ones took up to 1.9 times as long as equal
    # rows with the same number of tokens, with items of up to 704 tokens 1.2 times; equal rows take as long by either.
    tokens = 352 if rows <= 32 else 704
    return AttentionPlan(tile, triton.cdiv(tokens, tile), per * processors, 2, stages=5 if wide else 3, early=False)


@cache
def mixed_plan(head_dim: int, device: torch.device) -> AttentionPlan:
    """Of the decode rows of a mixed launch. The same for every number of rows, so that warm-up meets its one form.
    Measured as the others of `attention_plan`, with rows of many lengths."""
    if device.type != "cuda":
        return AttentionPlan(16, 2, _INTERPRETED_PROGRAMS, 1, stages=3, early=False)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if head_dim > 64:
        return AttentionPlan(32, 16, 6 * processors, 4, stages=5, early=False)
    return AttentionPlan(64, 8, 4 * processors, 2, stages=3, early=False)


def measured_plan(shapes: Iterable[AttentionShape], rows: int, queries: int) -> AttentionPlan | None:
    """What the table has for attention of decode launches of so many rows, of which each has up to `queries` query
    tokens; None where it has nothing, or where a model's kinds of attention differ in shape."""
    different = set(shapes)
    if len(different) != 1:
        return None
    found = measured_entry(plan_key(different.pop(), rows, queries))
    return None if found is None else AttentionPlan(**found)


def measured_entry(key: str) -> dict[str, Any] | None:
    """What the table has under this name, for a GPU like the one at hand."""
    return tuned().get(key) or _measured().get(key)


def plan_key(shape: AttentionShape, rows: int, queries: int) -> str:
    rows, queries = triton.next_power_of_2(rows), triton.next_power_of_2(queries)
    return f"attention {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, {rows} x {queries}"


def tiling_key(outputs: int, depth: int, columns: int, epilogue: str, exact: bool = False) -> str:
    return f"{outputs}x{depth} {epilogue} {columns}{' exact' if exact else ''}"


def _measured() -> dict[str, dict[str, Any]]:
    """By `tiling_key`, `plan_key` and `ExpertProduct.key`. Empty where nothing was measured for this GPU, or for what
    it is used as."""
    name = measured_gpu()
    return {} if name is None else _tables()[name]


@cache
def tuned() -> dict[str, dict[str, Any]]:
    """What `runahead tune` has found for this GPU, as far as this process has read it (`tuned_tilings`)."""
    return {}


def measured_gpu() -> str | None:
    """The GPU of the table whose tilings are this one's. None where there is none."""
    gpu = current_gpu()
    return None if gpu is None else gpu.measured_as(_tables())


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """By a GPU's name."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found
