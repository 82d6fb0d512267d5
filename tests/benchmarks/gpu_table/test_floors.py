"""The fewest bytes of a step, against numbers worked out by hand from the shapes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_table.floors import BANDWIDTH, StepBytes, step_bytes
from benchmarks.gpu_table.shapes import SHAPES

CONTEXT = 613


def bytes_of(shape: str) -> StepBytes:
    return step_bytes(SHAPES[shape].described(), torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "rows", "floor_ms"),
    [
        ("0.6B", 1, 0.274),
        ("0.6B", 8, 0.381),
        ("0.6B", 64, 1.237),
        ("1B", 1, 0.542),
        ("1B", 8, 0.572),
        ("1B", 64, 0.817),
        ("8B", 1, 3.280),
        ("8B", 8, 3.403),
        ("8B", 64, 4.381),
        ("8B", 256, 7.735),
    ],
)
def test_the_floor_is_all_weights_once_and_the_rows_keys_and_values(shape: str, rows: int, floor_ms: float) -> None:
    assert bytes_of(shape).floor_ms(rows * CONTEXT) == pytest.approx(floor_ms, abs=0.0006)


def test_a_tied_head_is_read_once_and_an_untied_embedding_not_at_all() -> None:
    per_layer = (16 + 2 * 8) * 128 * 1024 + 16 * 128 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert bytes_of("0.6B").weights == 2 * (28 * per_layer + 151936 * 1024 + 1024)
    per_layer = (32 + 2 * 8) * 128 * 4096 + 32 * 128 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert bytes_of("8B").weights == 2 * (32 * per_layer + 128256 * 4096 + 4096)


@pytest.mark.parametrize(("rows", "floor_ms"), [(1, 1.764), (8, 1.888), (64, 2.866), (256, 6.219)])
def test_the_floor_of_fp8_has_a_byte_for_each_number_of_the_layers(rows: int, floor_ms: float) -> None:
    """And a float32 scale for each output; the head stays in 16 bits."""
    bytes_ = step_bytes(SHAPES["8B"].described(), torch.bfloat16, "fp8")
    outputs, numbers = (
        32 * ((32 + 2 * 8) * 128 + 2 * 4096 + 2 * 14336),
        32 * ((32 + 2 * 8) * 128 * 4096 + 4096 * 4096 + 3 * 4096 * 14336),
    )
    assert bytes_.weights == bytes_of("8B").weights - numbers + 4 * outputs
    assert bytes_.floor_ms(rows * CONTEXT) == pytest.approx(floor_ms, abs=0.002)


def test_of_experts_those_that_are_named_are_read() -> None:
    bytes_ = bytes_of("30B-A3B")
    per_layer = (32 + 2 * 4) * 128 * 2048 + 32 * 128 * 2048 + 128 * 2048 + 2 * 2048 + 2 * 128
    assert bytes_.weights == 2 * (48 * per_layer + 151936 * 2048 + 2048)
    assert (bytes_.expert, bytes_.expert_layers) == (2 * 3 * 2048 * 768, 48)
    assert bytes_.floor_ms(CONTEXT, 8) == pytest.approx(1.33, abs=0.01)
    assert bytes_.floor_ms(64 * CONTEXT, 126) == pytest.approx(13.8, abs=0.2)


def test_a_state_is_read_and_written() -> None:
    """Granite 4.0 H Tiny: 57 MB a row. Of Qwen3-Next's layers every fourth has attention."""
    bytes_ = bytes_of("7B-A1B")
    assert bytes_.state == 36 * 4 * (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128))
    assert bytes_.kv_token == 4 * 2 * 4 * 128 * 2
    alone, with_states = bytes_.floor_ms(64 * CONTEXT, 62.0), bytes_.floor_ms(64 * CONTEXT, 62.0, 64)
    assert with_states - alone == pytest.approx(2 * 64 * bytes_.state / BANDWIDTH * 1e3)
    states = bytes_.role_floor_us("states", 64 * CONTEXT, 62.0, 64)
    assert states == pytest.approx((with_states - alone) * 1e3)
    experts = bytes_.role_floor_us("experts", 64 * CONTEXT, 62.0, 64)
    assert experts == pytest.approx((alone - bytes_.floor_ms(64 * CONTEXT)) * 1e3)
    assert bytes_of("40B-A3B-delta").state == 18 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert (bytes_of("8B").state, bytes_of("9B-hybrid").expert) == (0, 0)


def test_layers_that_are_one_half_each_are_counted_as_what_they_are() -> None:
    """Nemotron-H 8B: 24 mixers with states, 24 feed-forwards without gates, 4 with attention."""
    bytes_ = bytes_of("8B-hybrid")
    inner, channels = 128 * 64, 128 * 64 + 2 * 8 * 128
    mamba = (inner + channels + 128) * 4096 + 4 * channels + channels + 3 * 128 + inner + inner * 4096
    attention = (32 + 2 * 8) * 128 * 4096 + 32 * 128 * 4096
    assert bytes_.weights == 2 * (
        24 * (mamba + 2 * 4096 * 21504) + 4 * attention + 52 * 4096 + 131072 * 4096 + 4096
    )  # fmt: skip
    assert bytes_.kv_token == 4 * 2 * 8 * 128 * 2
    assert bytes_.state == 24 * 4 * (128 * 64 * 128 + 3 * channels)
    assert (bytes_.expert, bytes_.layers) == (0, 52)
    assert bytes_.roles["qkv"] == 2 * 4 * (32 + 2 * 8) * 128 * 4096
    assert bytes_.roles["gate_up"] == bytes_.roles["down"] == 2 * 24 * 4096 * 21504


def test_the_goals_of_the_hybrid_were_set_against_these_bytes() -> None:
    """With 6, 35 and 62 of 64 experts a layer."""
    bytes_ = bytes_of("7B-A1B")
    floors = [bytes_.floor_ms(rows * CONTEXT, named, rows) for rows, named in ((1, 6.0), (8, 35.0), (64, 62.0))]
    assert floors == pytest.approx([0.66, 2.04, 4.62], abs=0.005)


def test_a_token_keeps_a_key_and_a_value_of_every_kv_head_in_every_layer() -> None:
    assert bytes_of("0.6B").kv_token == 28 * 2 * 8 * 128 * 2
    assert bytes_of("1B").kv_token == 16 * 2 * 8 * 64 * 2


def test_the_floors_of_the_kinds_of_work_make_up_the_floor_but_for_the_norms() -> None:
    bytes_ = bytes_of("8B")
    tokens = 64 * CONTEXT
    roles = ("qkv", "attention", "o", "gate_up", "down", "head")
    floors = {role: bytes_.role_floor_us(role, tokens) for role in roles}
    assert floors["qkv"] == pytest.approx(32 * 6144 * 4096 * 2 / BANDWIDTH * 1e6)
    assert floors["head"] == pytest.approx(128256 * 4096 * 2 / BANDWIDTH * 1e6)
    norms_us = (2 * 32 + 1) * 4096 * 2 / BANDWIDTH * 1e6
    known = sum(floor for floor in floors.values() if floor is not None)
    assert known + norms_us == pytest.approx(bytes_.floor_ms(tokens) * 1e3)


def test_work_whose_bytes_nobody_knows_has_no_floor() -> None:
    assert bytes_of("8B").role_floor_us("sampling", 100) is None
