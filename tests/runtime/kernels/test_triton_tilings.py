"""The table of measured tilings, and what is taken where it has nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.runtime.kernels.layers import AttentionShape  # noqa: E402
from runahead.runtime.kernels.triton.attention.schedule import AttentionPlan  # noqa: E402
from runahead.runtime.kernels.triton.forward.buffers import DecodeBuffers  # noqa: E402
from runahead.runtime.kernels.triton.gemm import tuning  # noqa: E402
from runahead.runtime.kernels.triton.gemm.tuning import SPLIT_WORDS, TABLE, RowTiling, Tiling  # noqa: E402
from runahead.runtime.kernels.triton.gemm.warp_split_k import GRAIN  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import batch_of  # noqa: E402

ENTRIES = [
    (f"{gpu}: {key}", key, entry)
    for gpu, table in json.loads(TABLE.read_text()).items()
    for key, entry in table.items()
]
HALF = torch.bfloat16
PLANS = [case for case in ENTRIES if case[1].startswith("attention ")]
MEASURED = [case for case in ENTRIES if case not in PLANS and " experts of " not in case[1]]


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize(("key", "entry"), [case[1:] for case in MEASURED], ids=[case[0] for case in MEASURED])
def test_a_measured_tiling_fits_its_product_for_so_many_rows_and_for_fewer(key: str, entry: dict[str, Any]) -> None:
    size, epilogue, columns, *_ = key.split()
    outputs, depth = map(int, size.split("x"))
    if columns == "1":
        row = RowTiling(**entry)
        assert is_power_of_two(row.rows) and is_power_of_two(row.block) and is_power_of_two(row.warps)
        assert 1 <= row.held <= 16 and (row.held - 1) * row.block < depth
        return
    tiling = Tiling(**entry)
    assert is_power_of_two(tiling.rows) and tiling.rows >= 8 and is_power_of_two(tiling.block)
    assert depth % (tiling.block * tiling.splits) == 0
    if tiling.lanes > 1:
        assert columns in ("2", "4", "8", "16") and is_power_of_two(tiling.lanes) and tiling.lanes == tiling.warps
        assert tiling.rows * (2 if epilogue == "gated" else 1) in (16, 32, 64) and tiling.block % GRAIN == 0
        assert tiling.splits == 1 and depth % (tiling.block * tiling.lanes) == 0
    else:
        left = depth // tiling.splits // tiling.block - tiling.held
        assert left >= 0 and (left == 0) == (tiling.stages == 1)
    tiles = -(-(outputs // (2 if epilogue == "gated" else 1)) // tiling.rows)
    groups = -(-int(columns) // tiling.columns)
    spread = tiling.spread and tiling.splits > 1
    words = outputs * groups * min(int(columns), tiling.columns) * tiling.splits
    assert not spread or (tiles * groups <= 1024 and words <= SPLIT_WORDS)
    assert epilogue != "add" or tiling.rows >= 16


def test_measured_plans_of_attention_fit_their_query_tokens_and_each_context() -> None:
    for name, key, entry in PLANS:
        plan, queries = AttentionPlan(**entry), int(key.split()[-1])
        assert is_power_of_two(queries) and not plan.exact, name
        assert is_power_of_two(plan.tile) and is_power_of_two(plan.warps) and plan.share <= queries, name


@pytest.mark.parametrize("epilogue", ["store", "add", "gated"])
@pytest.mark.parametrize(("outputs", "depth"), [(64, 64), (6144, 4096), (4096, 192), (10240, 8192)])
@pytest.mark.parametrize("shared", [99 * 1024, 227 * 1024])
def test_what_was_not_measured_takes_a_default_that_fits(
    monkeypatch: pytest.MonkeyPatch, epilogue: str, outputs: int, depth: int, shared: int
) -> None:
    monkeypatch.setattr(tuning, "_measured", dict)
    monkeypatch.setattr(tuning, "_shared_memory", lambda: shared)
    for columns in (8, 16, 32, 64):
        tiling = tuning.rows_tiling(outputs, depth, columns, epilogue)
        assert depth % (tiling.block * tiling.splits) == 0
        tile = tiling.rows * (2 if epilogue == "gated" else 1)
        assert (tile + columns) * tiling.block * 2 * tiling.stages <= shared
        assert tiling.splits == 1 or outputs * columns * tiling.splits <= SPLIT_WORDS


def test_launches_that_are_no_bucket_s_run_by_the_plan_of_one() -> None:
    for rows, bucket in ((3, 4), (5, 8), (7, 8), (9, 16), (15, 16), (33, 64)):
        assert tuning.attention_plan(rows, 128, DEVICE) == tuning.attention_plan(bucket, 128, DEVICE)


def test_parts_have_room_for_the_context_that_a_launch_may_have() -> None:
    buffers, shape = DecodeBuffers(), AttentionShape(4, 2, 16, 0.25)
    batch = batch_of([5, 5], 1, DEVICE)
    plan = tuning.attention_plan(2, 16, DEVICE)
    short = buffers.parts(shape, batch, plan)
    long = buffers.parts(shape, replace(batch, max_seq_len=4000), plan)
    assert long.partial.shape[0] == 2 * 2 * plan.parts(4000) > short.partial.shape[0]
    assert buffers.parts(shape, batch, plan) is short


def test_parts_of_smaller_launches_lie_where_those_of_the_largest_do() -> None:
    """So that what the largest take, which a start tries out, is what all take. Nobody's address changes afterwards."""
    buffers, shape = DecodeBuffers(), AttentionShape(4, 2, 16, 0.25)
    of_rows = {rows: replace(batch_of([5] * rows, 1, DEVICE), max_seq_len=500) for rows in (8, 5, 2)}
    asked = [(replace(of_rows[rows], decode_queries=queries), rows) for rows in of_rows for queries in (8, 1)]
    made = [buffers.parts(shape, batch, tuning.attention_plan(rows, 16, DEVICE)) for batch, rows in asked]
    for name in ("partial", "top", "total", "arrived"):
        tensors = [getattr(parts, name) for parts in made]
        assert {tensor.data_ptr() for tensor in tensors} == {tensors[0].data_ptr()}, name
        assert max(tensor.nbytes for tensor in tensors) == tensors[0].untyped_storage().nbytes(), name
    larger = buffers.parts(shape, replace(asked[0][0], max_seq_len=4000), tuning.attention_plan(8, 16, DEVICE))
    assert larger.partial.data_ptr() != made[0].partial.data_ptr()
    again = [buffers.parts(shape, batch, tuning.attention_plan(rows, 16, DEVICE)) for batch, rows in asked]
    assert all(one is other for one, other in zip(again, made, strict=True))


def test_a_launch_takes_the_plan_that_was_measured_for_its_rows_and_query_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers, shape = DecodeBuffers(), AttentionShape(4, 2, 16, 0.25)
    buffers.add(shape, 0)
    buffers.add(shape, 7)
    plan, one = AttentionPlan(16, 2, 5, 2, stages=3, early=False, share=2), batch_of([5, 5], 1, DEVICE)
    of_one = replace(plan, share=0, programs=3)
    table = {tuning.plan_key(shape, 2, 4): asdict(plan), tuning.plan_key(shape, 4, 1): asdict(of_one)}
    monkeypatch.setattr(tuning, "_measured", lambda: table)
    several = replace(one, decode_queries=3)
    assert buffers.plan(several, HALF, exact=False) == plan, "three are cut as four are"
    assert buffers.plan(batch_of([5, 5, 5], 1, DEVICE), HALF, exact=False) == of_one, "three rows as four"
    usual = tuning.attention_plan(2, 16, DEVICE)
    two = replace(one, decode_queries=2)
    assert buffers.plan(one, HALF, exact=False) == buffers.plan(two, HALF, exact=False) == usual
    assert buffers.plan(several, torch.float32, exact=False) == usual, "whose tiles would be twice as large"
    assert buffers.plan(several, HALF, exact=True) == tuning.attention_plan(2, 16, DEVICE, True)
    buffers.add(AttentionShape(4, 2, 32, 0.25), 0)
    usual = tuning.attention_plan(2, 32, DEVICE)
    assert buffers.plan(several, HALF, exact=False) == usual, "not every kind has this shape"


def test_an_exact_product_has_one_number_of_parts_for_every_number_of_rows() -> None:
    parts: dict[tuple[str, str], set[int]] = {}
    for name, key, entry in MEASURED:
        product, epilogue, _, *exact = key.split(" ")
        if exact:
            parts.setdefault((name.split(":")[0], f"{product} {epilogue}"), set()).add(entry["splits"])
            of_a_part = int(product.split("x")[1]) // entry["splits"]
            apart = entry["splits"] > 1 and entry["spread"]
            assert apart or of_a_part >= 2 * entry["block"], "a part of one block is then not summed by itself"
    assert parts and all(len(of_product) == 1 for of_product in parts.values())
