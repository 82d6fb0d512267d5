"""Sizes of launches that nobody has set: by device and model, and so that nothing that was set is contradicted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from runahead.runtime import models
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.sizes import GIB, NAMES, Cpu, Gpu, ModelSize, with_sizes
from runahead.runtime.wire.engine_config import EngineConfig, check_config

BUNDLED = Path(models.__path__[0]) / "bundled"
CPU = Cpu(GIB)
H200 = Gpu("NVIDIA H200", 139 * GIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB)
SMALL_GPU = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB)
LLAMA_8B = ModelSize(16_060_522_496, 131_072, 8192)
QWEN_0_6B = ModelSize(1_192_099_840, 114_688, 40_960)
ON_CUDA = EngineConfig(model="any", device="cuda")
ON_CPU = EngineConfig(model="any", device="cpu")


def sizes(config: EngineConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in NAMES)


@pytest.mark.parametrize(
    ("gpu", "model", "expected"),
    [
        (H200, LLAMA_8B, (1, 256, 2048, 8192, 1408, 16_384)),
        (H200, QWEN_0_6B, (2, 256, 2048, 8192, 8192, 24_576)),
        (H100, LLAMA_8B, (1, 256, 2048, 8192, 1408, 16_384)),
        (H200, ModelSize(61 * GIB, 98_304, 32_768), (1, 256, 2048, 2048, 512, 4096)),
        (SMALL_GPU, LLAMA_8B, (1, 32, 2048, 2048, 512, 4096)),
        (Gpu("small", 8 * GIB), QWEN_0_6B, (2, 32, 1024, 1024, 1024, 3072)),
        (Gpu("far too small", GIB), LLAMA_8B, (1, 8, 512, 512, 512, 1024)),  # which is refused for its memory
        (H200, ModelSize(GIB, 0, 8192), (2, 256, 2048, 8192, 8192, 24_576)),  # without attention
    ],
)
def test_a_gpu_gets_what_its_memory_and_the_weights_say(gpu: Gpu, model: ModelSize, expected: tuple[int, ...]) -> None:
    assert sizes(with_sizes(ON_CUDA, gpu, model)[0]) == expected


def test_the_reason_names_the_gpu_s_memory_the_weights_and_what_was_set() -> None:
    assert with_sizes(ON_CUDA, H200, LLAMA_8B)[1] == "by the rule for GPUs of 139 GiB and weights of 15.0 GiB"
    small = msgspec.structs.replace(ON_CUDA, max_rows=8, prefill_chunk=128, max_prefill_tokens=256)
    assert with_sizes(small, H200, LLAMA_8B)[1] == (
        "by the rule for GPUs of 139 GiB and weights of 15.0 GiB; set: max_rows, prefill_chunk, max_prefill_tokens"
    )


def test_what_drafts_takes_room_from_rows_and_leaves_the_launches_as_they_are() -> None:
    """It lies where keys and values could; a prompt's token meets little of a head."""
    heavier = replace(LLAMA_8B, draft_weight_bytes=3 * GIB)
    keeping = replace(LLAMA_8B, token_bytes=2 * LLAMA_8B.token_bytes)
    assert sizes(with_sizes(ON_CUDA, SMALL_GPU, LLAMA_8B)[0]) == (1, 32, 2048, 2048, 512, 4096)
    for model in (replace(heavier, draft_weight_bytes=6 * GIB), keeping):
        assert sizes(with_sizes(ON_CUDA, SMALL_GPU, model)[0]) == (1, 16, 2048, 2048, 512, 4096)
    assert with_sizes(ON_CUDA, H200, heavier) == (
        with_sizes(ON_CUDA, H200, LLAMA_8B)[0],
        "by the rule for GPUs of 139 GiB and weights of 18.0 GiB, 3.0 GiB of them of what drafts",
    )


def test_a_model_that_drafts_makes_launches_smaller_through_which_a_prompt_goes_whole() -> None:
    heavier = replace(QWEN_0_6B, draft_weight_bytes=31 * GIB)
    assert sizes(with_sizes(ON_CUDA, H200, heavier)[0]) == (2, 256, 2048, 8192, 8192, 24_576)
    by_model = msgspec.structs.replace(ON_CUDA, drafter="model")
    assert sizes(with_sizes(by_model, H200, heavier)[0]) == (2, 256, 2048, 2048, 640, 6144)


def test_a_cpu_gets_small_launches_whatever_the_model() -> None:
    for model in (LLAMA_8B, QWEN_0_6B):
        assert sizes(with_sizes(ON_CPU, CPU, model)[0]) == (2, 64, 128, 256, 256, 512)


SETS = [
    dict(zip(NAMES[1:], values, strict=True))
    for values in itertools.product((0, 3, 512), (0, 512), (0, 512, 1024), (0, 64, 4096), (0, 512, 100_000))
]


@pytest.mark.parametrize("machine", [CPU, SMALL_GPU, H200], ids=str)
@pytest.mark.parametrize("run_ahead", [0, 2, 4])
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_what_was_set_stays_and_the_rest_goes_with_it(machine: Gpu | Cpu, run_ahead: int, block_size: int) -> None:
    for asked in SETS:
        config = msgspec.structs.replace(
            ON_CPU if machine is CPU else ON_CUDA, run_ahead=run_ahead, block_size=block_size, **asked
        )
        check_config(config)
        found, why = with_sizes(config, machine, LLAMA_8B)
        check_config(found)
        assert all(getattr(found, name) == value for name, value in asked.items() if value)
        assert min(sizes(found)[1:]) > 0
        given = [NAMES[0], *(name for name, value in asked.items() if value)]
        assert why.partition("; set: ")[2] == ("" if len(given) == len(NAMES) else ", ".join(given))
        assert (why == "all of them were set") == (len(given) == len(NAMES))


@pytest.mark.parametrize(("chunk", "rows"), [(2048, 256), (4096, 256), (4800, 225), (5360, 15)])
def test_rows_are_as_many_as_a_plan_can_name_beside_a_chunk_that_was_set(chunk: int, rows: int) -> None:
    config = msgspec.structs.replace(ON_CUDA, prefill_chunk=chunk, block_size=8)
    check_config(config)
    found, _ = with_sizes(config, H200, LLAMA_8B)
    check_config(found)
    assert (found.max_rows, found.prefill_chunk) == (rows, chunk)


@pytest.mark.parametrize("name", ["max_prefill_tokens", "run_ahead_tokens"])
@pytest.mark.parametrize("tokens", [16, 100, 127, 300])
@pytest.mark.parametrize("machine", [CPU, H200], ids=str)
def test_a_chunk_fits_a_bound_that_was_set(name: str, tokens: int, machine: Gpu | Cpu) -> None:
    config = msgspec.structs.replace(ON_CPU if machine is CPU else ON_CUDA, **{name: tokens})
    found, _ = with_sizes(config, machine, LLAMA_8B)
    check_config(found)
    assert getattr(found, name) == tokens
    assert found.prefill_chunk == min(tokens // 16 * 16, 128 if machine is CPU else 2048)


def test_no_more_rows_than_a_pool_that_was_set_can_serve() -> None:
    for blocks, rows in ((2, 1), (9, 8), (1000, 64)):
        config = msgspec.structs.replace(ON_CPU, num_blocks=blocks)
        found, _ = with_sizes(config, CPU, LLAMA_8B)
        check_config(found)
        assert found.max_rows == rows


def test_rows_whose_states_would_fill_a_cpus_cache_are_fewer() -> None:
    for row_bytes, rows in ((1 << 20, 64), (58_100_000, 9), (GIB, 1)):
        found, why = with_sizes(ON_CPU, CPU, ModelSize(GIB, 8192, 4096, row_bytes))
        assert found.max_rows == rows
        assert why == "what a CPU gets, with rows whose states take half of 1 GiB at most"
        asked = msgspec.structs.replace(ON_CPU, max_rows=64)
        assert with_sizes(asked, CPU, ModelSize(GIB, 8192, 4096, row_bytes))[1] == "what a CPU gets; set: max_rows"


def test_a_launch_that_was_set_may_be_queued_on_a_cpu() -> None:
    found, _ = with_sizes(msgspec.structs.replace(ON_CPU, max_prefill_tokens=1024), CPU, LLAMA_8B)
    assert found.run_ahead_tokens == 1024


def test_prompts_are_bounded_by_what_their_products_take_and_not_by_what_memory_holds() -> None:
    quantized = replace(LLAMA_8B, weight_bytes=8 * GIB, prompt_bytes=LLAMA_8B.weight_bytes)
    found, plain = (with_sizes(ON_CUDA, H200, model)[0] for model in (quantized, LLAMA_8B))
    assert found.mixed_prefill_tokens == plain.mixed_prefill_tokens
    assert found.max_prefill_tokens == plain.max_prefill_tokens


@pytest.mark.parametrize(("gap", "tokens"), [(1, 512), (20, 704), (40, 1408), (100, 3648), (10_000, 8192)])
def test_prompts_beside_rows_are_bounded_by_the_gap_between_two_tokens(gap: int, tokens: int) -> None:
    config = msgspec.structs.replace(ON_CUDA, token_gap_ms=gap)
    assert with_sizes(config, H200, LLAMA_8B)[0].mixed_prefill_tokens == tokens
    assert with_sizes(config, SMALL_GPU, LLAMA_8B)[0].mixed_prefill_tokens == max(
        512, min(2048, tokens * 24 // 64 // 64 * 64)
    )
    asked = msgspec.structs.replace(config, mixed_prefill_tokens=64)
    assert with_sizes(asked, H200, LLAMA_8B)[0].mixed_prefill_tokens == 64


def test_a_start_says_what_was_chosen_and_why() -> None:
    with capture_logs() as events:
        parts = assemble(
            EngineConfig(model=str(BUNDLED), max_rows=3, device="cpu", threads=1), lambda done, total: None
        )
    parts.device.close()
    (said,) = [event for event in events if event["event"] == "sizes"]
    assert {name: said[name] for name in NAMES} == {
        "run_ahead": 2, "max_rows": 3, "prefill_chunk": 128, "max_prefill_tokens": 256, "mixed_prefill_tokens": 256,
        "run_ahead_tokens": 512,
    }  # fmt: skip
    assert said["why"] == "what a CPU gets; set: max_rows"
    prompts = parts.info.prompt_launches
    assert (prompts.chunk, prompts.launch, prompts.queued, prompts.why) == (128, 256, 512, said["why"])
    assert parts.scheduler.limits.max_prefill_tokens == 256
    assert parts.scheduler.ledger.run_ahead_tokens == 512
