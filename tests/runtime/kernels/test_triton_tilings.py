"""The table of measured tilings, and what is taken where it has nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import AttentionShape  # noqa: E402
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers  # noqa: E402
from runahead.runtime.kernels.triton.gemm import tuning  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import SPLIT_WORDS, TABLE, Tiling  # noqa: E402
from runahead.runtime.kernels.triton.gemm.warp_split_k import GRAIN, WARP_OUTPUTS  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import batch_of  # noqa: E402

ENTRIES = [
    (f"{gpu}: {key}", key, entry)
    for gpu, table in json.loads(TABLE.read_text()).items()
    for key, entry in table.items()
]
MEASURED = [case for case in ENTRIES if " experts of " not in case[1]]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize(("key", "entry"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_a_measured_tiling_fits_its_product_for_so_many_rows_and_for_fewer(key: str, entry: dict[str, Any]) -> None:
    size, epilogue, columns, *_ = key.split()
    outputs, depth = map(int, size.split("x"))
    tiling = Tiling(**entry)
    assert is_power_of_two(tiling.rows) and tiling.rows >= 8 and is_power_of_two(tiling.block)
    assert depth % (tiling.block * tiling.splits) == 0
    if tiling.direct:
        assert columns in ("2", "4", "8", "16") and tiling.warps % tiling.splits == 0
        warp_outputs = tiling.rows * (2 if epilogue == "gated" else 1) * tiling.splits // tiling.warps
        assert warp_outputs in WARP_OUTPUTS and tiling.block % GRAIN == 0 and tiling.stages == 1
    else:
        left = depth // tiling.splits // tiling.block - tiling.held
        assert left >= 0 and (left == 0) == (tiling.stages == 1)
    tiles = -(-(outputs // (2 if epilogue == "gated" else 1)) // tiling.rows)
    groups = -(-int(columns) // tiling.columns)
    spread = tiling.spread and tiling.splits > 1 and not tiling.direct
    words = outputs * groups * min(int(columns), tiling.columns) * tiling.splits
    assert not spread or (tiles * groups <= 1024 and words <= SPLIT_WORDS)
    assert epilogue != "add" or tiling.rows >= 8


@pytest.mark.parametrize("epilogue", ["store", "add", "gated"])
@pytest.mark.parametrize(("outputs", "depth"), [(64, 64), (6144, 4096), (4096, 192), (10240, 8192), (96, 100)])
@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
def test_what_was_not_measured_takes_a_default_that_fits(
    monkeypatch: pytest.MonkeyPatch, epilogue: str, outputs: int, depth: int, shared: int
) -> None:
    monkeypatch.setattr(tuning, "_measured", dict)
    monkeypatch.setattr(tuning, "_shared_memory", lambda: shared)
    for columns, itemsize in itertools.product((8, 16, 32, 64), (2, 4)):
        tiling = tuning.rows_tiling(outputs, depth, columns, epilogue, itemsize)
        assert tiling.splits == 1 or depth % (tiling.block * tiling.splits) == 0
        tile = tiling.rows * (2 if epilogue == "gated" else 1)
        assert (tile + min(columns, tiling.columns)) * tiling.block * itemsize * tiling.stages <= shared
        assert not tiling.spread or outputs * columns * tiling.splits <= SPLIT_WORDS


def test_few_rows_do_not_take_what_was_measured_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Tiling(rows=64, block=128, splits=2, stages=4, warps=8)
    monkeypatch.setattr(tuning, "_measured", lambda: {tuning.tiling_key(4096, 1024, 64, "store"): asdict(many)})
    for columns in (2, 8):
        assert tuning.rows_tiling(4096, 1024, columns, "store") == tuning.default_tiling(4096, 1024, 8, 1, 2)
    assert tuning.rows_tiling(4096, 1024, 16, "store") == many


def test_float32_has_one_tile_of_keys_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))
    for rows in (1, 8, 64):
        halves, wide = (tuning.attention_plan(rows, 128, torch.device("cuda"), 2, 2, size) for size in (2, 4))
        assert (wide.stages, wide.early) == (1, False) and halves.stages > 1
        assert replace(wide, stages=halves.stages, early=halves.early, programs=halves.programs) == halves, "its bits"
    tuning.attention_plan.cache_clear()


def test_as_many_programs_of_attention_run_at_a_time_where_shared_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))
    plans = []
    for shared in (99 << 10, 163 << 10, 227 << 10):
        monkeypatch.setattr(tuning, "_shared_memory", lambda shared=shared: shared)
        tuning.attention_plan.cache_clear()
        plans.append(tuning.attention_plan(8, 128, torch.device("cuda")))
    assert [plan.stages for plan in plans] == [3, 5, 5]
    assert plans[0] == replace(plans[1], stages=3), "its bits, and its items"
    tuning.attention_plan.cache_clear()


def test_attention_of_few_rows_requests_tiles_early_where_many_heads_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    of = {(rows, heads): tuning.attention_plan(rows, 128, torch.device("cuda"), 8, heads).early
          for rows in (1, 2, 8, 16) for heads in (2, 4)}  # fmt: skip
    tuning.attention_plan.cache_clear()
    assert of == {(1, 2): True, (2, 2): True, (8, 2): False, (16, 2): False, (1, 4): True, (2, 4): True,
                  (8, 4): True, (16, 4): False}  # fmt: skip


def test_launches_that_are_no_bucket_s_run_by_the_plan_of_one() -> None:
    for rows, bucket in ((3, 4), (5, 8), (7, 8), (9, 16), (15, 16), (33, 64)):
        assert tuning.attention_plan(rows, 128, DEVICE) == tuning.attention_plan(bucket, 128, DEVICE)


def test_parts_have_room_for_the_context_that_a_launch_may_have() -> None:
    buffers, shape = DecodeBuffers(), AttentionShape(4, 2, 16, 0.25)
    batch = batch_of([5, 5], 1, DEVICE)
    plan = tuning.attention_plan(2, 16, DEVICE)
    short = buffers.parts(shape, batch, plan)
    long = buffers.parts(shape, replace(batch, max_seq_len=4000), plan)
    assert long.partial.shape[0] == 2 * plan.sums(2, 4000) > short.partial.shape[0]
    assert buffers.parts(shape, batch, plan) is short


def test_parts_of_smaller_launches_lie_where_those_of_the_largest_do() -> None:
    """So that what the largest take, which a start tries out, is what all take. Nobody's address changes afterwards."""
    buffers, shape = DecodeBuffers(), AttentionShape(4, 2, 16, 0.25)
    asked = [(replace(batch_of([5] * rows, 1, DEVICE), max_seq_len=200), rows) for rows in (8, 5, 2)]
    made = [buffers.parts(shape, batch, tuning.attention_plan(rows, 16, DEVICE)) for batch, rows in asked]
    for name in ("partial", "top", "total", "arrived"):
        tensors = [getattr(parts, name) for parts in made]
        assert {tensor.data_ptr() for tensor in tensors} == {tensors[0].data_ptr()}, name
        assert max(tensor.nbytes for tensor in tensors) == tensors[0].untyped_storage().nbytes(), name
    larger = buffers.parts(shape, replace(asked[0][0], max_seq_len=4000), tuning.attention_plan(8, 16, DEVICE))
    assert larger.partial.data_ptr() != made[0].partial.data_ptr()
    again = [buffers.parts(shape, batch, tuning.attention_plan(rows, 16, DEVICE)) for batch, rows in asked]
    assert all(one is other for one, other in zip(again, made, strict=True))


def test_measured_tilings_of_products_have_the_segments_of_their_definition() -> None:
    assert MEASURED
    for name, key, entry in MEASURED:
        outputs, depth = map(int, key.split(" ")[0].split("x"))
        assert entry["splits"] == tuning.segments(outputs, depth), name
        apart = entry["splits"] > 1 and (entry["spread"] or entry.get("direct", False))
        assert apart or depth // entry["splits"] >= 2 * entry["block"], "one block is not summed by itself"


@pytest.mark.parametrize(
    ("outputs", "depth", "count"),
    [
        *((4096, 1024, 2), (1024, 2048, 4), (6144, 1024, 2), (1024, 3072, 4), (3072, 2048, 4), (2048, 2048, 4)),
        *((16384, 2048, 1), (2048, 8192, 1), (6144, 4096, 1), (4096, 4096, 1), (28672, 4096, 1), (4096, 14336, 1)),
        *((64, 128, 1), (512, 1536, 2), (128, 1088, 1), (4096, 1000, 1)),
    ],
)
def test_the_segments_of_a_product_follow_from_its_shape(
    monkeypatch: pytest.MonkeyPatch, outputs: int, depth: int, count: int
) -> None:
    """With the table and without it."""
    assert tuning.segments(outputs, depth) == count
    table = json.loads(TABLE.read_text())["NVIDIA H200"]
    for measured in (dict, lambda: table):
        monkeypatch.setattr(tuning, "_measured", measured)
        for columns, epilogue in itertools.product((2, 4, 8, 16, 64, 128, 256, 4096), ("store", "add", "gated")):
            tiling = tuning.rows_tiling(outputs, depth, columns, epilogue)
            assert tiling.splits == count
            assert not tiling.direct or (columns <= 16 and depth // count % tiling.block == 0)
