"""Which kernels a start on a GPU takes, the exact ones or the fastest: by what was asked for, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runahead.cuda_graphs.buckets import buckets_for
from runahead.runtime.kernels.triton.exactness import (
    MOST_RATIO,
    TABLE,
    choose_exactness,
    measured_ratios,
    shape_key,
    why_impossible,
)
from runahead.runtime.models.weights import described
from tests.gpu.gpu_chain import small_config

CHEAP = {1: 1.0, 8: 1.03, 64: 0.99}
IMPOSSIBLE = "there are none"


def test_exact_where_every_bucket_served_costs_little_and_the_largest_ratio_is_said() -> None:
    chosen = choose_exactness("auto", "", CHEAP, [1, 8, 64])
    assert (chosen.exact, chosen.largest_ratio) == (True, MOST_RATIO)
    assert chosen.why == "it costs at most 3% of a decode step in every bucket served"


def test_one_dear_bucket_that_is_served_is_enough_for_the_fastest() -> None:
    dear = {**CHEAP, 64: 1.031}
    chosen = choose_exactness("auto", "", dear, [1, 8, 64])
    assert (chosen.exact, chosen.largest_ratio) == (False, 1.031)
    assert chosen.why == "it costs more than 3% of a decode step in a bucket served"
    assert choose_exactness("auto", "", dear, [1, 8]).exact, "a bucket that is not served counts for nothing"


def test_a_bucket_that_was_not_measured_counts_as_the_dearer_one_of_its_neighbours() -> None:
    measured = {8: 1.0, 16: 1.02, 24: 1.05}
    assert choose_exactness("auto", "", measured, [8, 12]).largest_ratio == 1.02
    assert choose_exactness("auto", "", measured, [8, 20]).largest_ratio == 1.05


@pytest.mark.parametrize(
    ("measured", "buckets", "why"),
    [
        ({}, [1, 8], "nobody has measured this model on this GPU"),
        (CHEAP, [1, 8, 64, 96, 128], "nobody has measured this model on this GPU with 96, 128 rows"),
        ({8: 1.0}, [1, 8], "nobody has measured this model on this GPU with 1 rows"),
    ],
)
def test_what_was_not_measured_is_not_exact_and_said(measured: dict[int, float], buckets: list[int], why: str) -> None:
    chosen = choose_exactness("auto", "", measured, buckets)
    assert (chosen.exact, chosen.largest_ratio) == (False, None)
    assert chosen.why == f"what it costs is not known: {why}"


@pytest.mark.parametrize("measured", [{}, CHEAP, {1: 9.0, 8: 9.0, 64: 9.0}])
def test_whoever_asks_has_it_whatever_it_costs(measured: dict[int, float]) -> None:
    for asked, exact in (("on", True), ("off", False)):
        chosen = choose_exactness(asked, "", measured, [1, 8, 64])
        assert (chosen.exact, chosen.why) == (exact, "asked for")
        assert chosen.largest_ratio == (max(measured.values()) if measured else None)


def test_a_model_without_exact_kernels_is_not_exact_and_the_reason_is_said() -> None:
    chosen = choose_exactness("auto", IMPOSSIBLE, CHEAP, [1, 8])
    assert (chosen.exact, chosen.why, chosen.largest_ratio) == (False, IMPOSSIBLE, None)


def test_there_are_exact_kernels_for_bfloat16_and_depths_that_the_matrix_units_take() -> None:
    fits = described(small_config(intermediate_size=128)).layers
    assert why_impossible(fits, torch.bfloat16) == ""
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        why = why_impossible(fits, dtype)
        assert why == f"the exact kernels are for bfloat16, and the model is served in {name}"
    odd = described(small_config(intermediate_size=96)).layers
    assert why_impossible(odd, torch.bfloat16) == (
        "tiles of the exact kernels do not divide the 96 numbers that a product of the model sums"
    )


def test_the_key_of_a_model_says_everything_that_decides_how_long_a_step_takes() -> None:
    keys = {
        shape_key(described(config).layers, config.vocab_size, torch.bfloat16)
        for config in (
            small_config(),
            small_config(num_layers=3, windows=(0, 0, 0)),
            small_config(hidden_size=128),
            small_config(num_heads=8),
            small_config(num_kv_heads=4),
            small_config(head_dim=32),
            small_config(intermediate_size=64),
            small_config(vocab_size=200),
            small_config(windows=(0, 24)),
        )
    }
    assert len(keys) == 9
    layers = described(small_config(windows=(0, 24))).layers
    assert shape_key(layers, 160, torch.float16) == (
        "1 layers of 4 heads and 2 KV heads of 16, feed-forward 96; "
        "1 layers of 4 heads and 2 KV heads of 16 within 24 tokens, feed-forward 96; "
        "hidden size 64, vocabulary 160, float16"
    )


def test_a_table_is_read_by_gpu_and_model(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert measured_ratios("a GPU", "a model", table) == {}, "there is no table"
    table.write_text(json.dumps({"a GPU": {"a model": {"1": 1.5, "16": 1.25}}}))
    assert measured_ratios("a GPU", "a model", table) == {1: 1.5, 16: 1.25}
    assert measured_ratios("a GPU", "another", table) == measured_ratios("another", "a model", table) == {}


def test_what_was_measured_are_ratios_of_buckets() -> None:
    known = {*buckets_for(513)[:-1]}
    for models in json.loads(TABLE.read_text()).values():
        for ratios in models.values():
            assert {int(rows) for rows in ratios} <= known
            assert all(0.5 < ratio < 5 for ratio in ratios.values())
