"""Settings that can't be are refused by name, before anything is started."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.scheduler.plan_builder import PlanBuilder
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig, check_config

GOOD = EngineConfig(model="folder")


def test_the_defaults_can_be() -> None:
    check_config(GOOD)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run_ahead": 5}, ("run_ahead", "4", "5")),
        ({"max_rows": 1025}, ("max_rows", "1024")),
        ({"max_rows": -1}, ("max_rows",)),
        ({"device": "tpu"}, ("device", "tpu")),
        ({"dtype": "int8"}, ("dtype", "int8")),
        ({"load_format": "pickle"}, ("load_format", "pickle")),
        ({"context_length": 1}, ("context_length (1)", "at least 2")),
        ({"block_size": 24, "prefill_chunk": 48}, ("block_size", "power of two", "24")),
        ({"prefill_chunk": 24}, ("prefill_chunk", "24", "block_size", "16")),
        ({"max_prefill_tokens": 64, "prefill_chunk": 128}, ("max_prefill_tokens", "64", "prefill_chunk", "128")),
        ({"max_prefill_tokens": 8}, ("max_prefill_tokens (8)", "block_size (16)")),
        ({"run_ahead_tokens": 15}, ("run_ahead_tokens (15)", "block_size (16)")),
        ({"jitter_seed": 1, "device": "cuda"}, ("jitter_seed", "cuda")),
        ({"counters_from": -1}, ("counters_from", "0", "-1")),
        ({"counters_from": 1 << 63}, ("counters_from",)),
        ({"served_name": "a\nb"}, (r"'a\nb'", "served_name")),
        ({"served_name": "a\x1b[2J"}, (r"'a\x1b[2J'", "served_name")),
    ],
)
def test_a_setting_that_cannot_be_is_named(changes: dict[str, object], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(msgspec.structs.replace(GOOD, **changes))
    assert all(name in str(refusal.value) for name in named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"threads": 3, "device": "cuda"}, ("threads", "3", "device cuda")),
        ({"kernel_cache": "/kernels", "device": "cpu"}, ("kernel_cache must be empty", "device cpu", "/kernels")),
        ({"run_ahead_tokens": 127, "prefill_chunk": 128}, ("run_ahead_tokens", "127", "prefill_chunk", "128")),
        (
            {"run_ahead_tokens": 16, "prefill_chunk": 128, "max_prefill_tokens": 4096},
            ("run_ahead_tokens", "prefill_chunk", "max_prefill_tokens", "4096"),
        ),
        ({"log_mode": "barrier"}, ("log_mode barrier", "log_interval 0")),
        ({"drafter": "eagle"}, ("drafter eagle", "draft_model")),
        ({"drafter": "ngram", "draft_model": "folder"}, ("draft_model", "folder", "drafter ngram")),
        (
            {"drafter": "mtp", "draft_model": "folder"},
            ("draft_model", "drafter mtp", "the model's checkpoint"),
        ),
        ({"drafter": "model"}, ("drafter model", "needs a smaller model", "draft_model")),
        ({"draft_tokens": 3}, ("draft_tokens (3)", "drafter none")),
        ({"draft_forced": False, "drafter": "ngram"}, ("draft_forced", "drafter ngram")),
        ({"num_blocks": 64, "max_rows": 64}, ("max_rows", "num_blocks", "64")),
        ({"num_blocks": 65, "context_length": 1026}, ("context_length", "1026", "num_blocks", "65", "block_size")),
    ],
)
def test_settings_that_cannot_go_together_are_both_named(changes: dict[str, object], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_config(msgspec.structs.replace(GOOD, **changes))
    assert all(name in str(refusal.value) for name in named)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_ahead_tokens": 128, "prefill_chunk": 128},
        {"run_ahead_tokens": 16},
        {"num_blocks": 2},
        {"context_length": 2},
        {"run_ahead": 0, "run_ahead_tokens": 1},  # nothing is ever queued behind another
        {"run_ahead_tokens": 512, "prefill_chunk": 512, "max_prefill_tokens": 4096},  # chunks are queued
        {"log_mode": "barrier", "log_interval": 1},
        {"num_blocks": 65, "max_rows": 64},
        {"num_blocks": 65, "context_length": 1025},
        {"threads": 3},
        {"dtype": "bfloat16", "kernel_cache": "/kernels"},  # there may be a GPU
        {"device": "cuda"},
        {"max_rows": 1, "penalty_slots": 16},
        {"drafter": "ngram"},
        {"drafter": "ngram", "device": "cuda"},
        {"drafter": "ngram", "draft_tokens": 7},
        {"drafter": "eagle", "draft_model": "folder"},
        {"drafter": "eagle", "draft_model": "folder", "device": "cuda"},
        {"drafter": "mtp"},
        {"drafter": "mtp", "device": "cuda"},
        {"drafter": "model", "draft_model": "folder"},
    ],
)
def test_settings_at_the_edge_of_what_can_be_are_taken(changes: dict[str, object]) -> None:
    check_config(msgspec.structs.replace(GOOD, **changes))


def with_chunk(prefill_chunk: int, max_rows: int = 64) -> EngineConfig:
    return EngineConfig(
        model="folder",
        prefill_chunk=prefill_chunk,
        max_prefill_tokens=1 << 15,
        run_ahead_tokens=1 << 15,
        block_size=8,
        max_rows=max_rows,
    )


def test_a_chunk_whose_blocks_no_plan_can_name_is_refused_with_both_settings() -> None:
    with pytest.raises(ConfigError, match=r"prefill_chunk of 8192 tokens .*block_size"):
        check_config(with_chunk(8192))


@pytest.mark.parametrize("max_rows", [1, 64, 512])
def test_the_largest_chunk_that_is_let_through_fits_the_plan_of_a_new_row_beside_all_others(max_rows: int) -> None:
    largest = 0
    for chunk in range(8, 1 << 14, 8):
        try:
            check_config(with_chunk(chunk, max_rows))
        except ConfigError:
            break
        largest = chunk
    assert 0 < largest < 8192, "the bound was not reached"
    builder = PlanBuilder(1, PLAN_WORDS, 1 << 20, 1 << 15)
    builder.decode(np.arange(max_rows - 1, dtype=np.int32))
    assert builder.fits(largest, largest // 8, record_words=20)
    assert not builder.fits(largest + 16, largest // 8 + 2, record_words=20), "the bound is far too careful"
