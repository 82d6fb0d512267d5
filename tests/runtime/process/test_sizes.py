"""Sizes of launches that nobody has set: by device and model, and so that nothing that was set is contradicted."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from runahead.runtime import models
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.sizes import GIB, NAMES, Gpu, ModelSize, with_sizes
from runahead.runtime.wire.engine_config import EngineConfig, check_config

BUNDLED = Path(models.__path__[0]) / "bundled"
H200 = Gpu("NVIDIA H200", 139 * GIB)
SMALL_GPU = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB)
LLAMA_8B = ModelSize(16_060_522_496, 131_072, 8192)
QWEN_0_6B = ModelSize(1_192_099_840, 114_688, 40_960)
ON_CUDA = EngineConfig(model="any", device="cuda")
ON_CPU = EngineConfig(model="any")


def sizes(config: EngineConfig) -> tuple[int, ...]:
    return tuple(getattr(config, name) for name in NAMES)


@pytest.mark.parametrize(
    ("gpu", "model", "expected"),
    [
        (H200, LLAMA_8B, (256, 2048, 8192, 24_576)),
        (H200, QWEN_0_6B, (256, 2048, 8192, 24_576)),
        (Gpu("NVIDIA H100 80GB HBM3", 80 * GIB), LLAMA_8B, (256, 2048, 8192, 24_576)),
        (H200, ModelSize(61 * GIB, 98_304, 32_768), (256, 2048, 2048, 6144)),
        (SMALL_GPU, LLAMA_8B, (32, 2048, 2048, 6144)),
        (Gpu("small", 8 * GIB), QWEN_0_6B, (32, 1024, 1024, 3072)),
        (Gpu("far too small", GIB), LLAMA_8B, (8, 512, 512, 1536)),  # which is refused for its memory
        (H200, ModelSize(GIB, 0, 8192), (256, 2048, 8192, 24_576)),  # without attention
    ],
)
def test_a_gpu_gets_what_its_memory_and_the_weights_say(gpu: Gpu, model: ModelSize, expected: tuple[int, ...]) -> None:
    assert sizes(with_sizes(ON_CUDA, gpu, model)[0]) == expected


def test_only_what_was_measured_is_called_measured() -> None:
    assert with_sizes(ON_CUDA, H200, LLAMA_8B)[1] == (
        "the fastest that were measured on NVIDIA H200 with weights of 15.0 GiB"
    )
    for gpu, model in ((H200, QWEN_0_6B), (SMALL_GPU, LLAMA_8B)):
        assert with_sizes(ON_CUDA, gpu, model)[1].endswith(f"not measured on {gpu.name}")


def test_a_cpu_gets_small_launches_whatever_the_model() -> None:
    for model in (LLAMA_8B, QWEN_0_6B):
        assert sizes(with_sizes(ON_CPU, None, model)[0]) == (64, 128, 256, 512)


SETS = [
    dict(zip(NAMES, values, strict=True))
    for values in itertools.product((0, 3, 512), (0, 512), (0, 512, 1024), (0, 512, 100_000))
]


@pytest.mark.parametrize("gpu", [None, SMALL_GPU, H200], ids=str)
@pytest.mark.parametrize("run_ahead", [0, 2, 4])
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_what_was_set_stays_and_the_rest_goes_with_it(gpu: Gpu | None, run_ahead: int, block_size: int) -> None:
    for asked in SETS:
        config = msgspec.structs.replace(
            ON_CUDA if gpu else ON_CPU, run_ahead=run_ahead, block_size=block_size, **asked
        )
        check_config(config)
        found, why = with_sizes(config, gpu, LLAMA_8B)
        check_config(found)
        assert all(getattr(found, name) == value for name, value in asked.items() if value)
        assert min(sizes(found)) > 0
        assert all((name in why) == bool(value) for name, value in asked.items()) or all(asked.values())


@pytest.mark.parametrize("chunk", [2048, 4096, 4800, 5360])
def test_rows_are_as_many_as_a_plan_can_name_beside_a_chunk_that_was_set(chunk: int) -> None:
    config = msgspec.structs.replace(ON_CUDA, prefill_chunk=chunk, block_size=8)
    check_config(config)
    found, _ = with_sizes(config, H200, LLAMA_8B)
    check_config(found)
    assert found.max_rows == 256 or chunk > 4096
    assert found.max_rows > 0 and found.prefill_chunk == chunk


@pytest.mark.parametrize("name", ["max_prefill_tokens", "run_ahead_tokens"])
@pytest.mark.parametrize("tokens", [16, 100, 127, 300])
@pytest.mark.parametrize("gpu", [None, H200], ids=str)
def test_a_chunk_fits_a_bound_that_was_set(name: str, tokens: int, gpu: Gpu | None) -> None:
    config = msgspec.structs.replace(ON_CUDA if gpu else ON_CPU, **{name: tokens})
    found, _ = with_sizes(config, gpu, LLAMA_8B)
    check_config(found)
    assert getattr(found, name) == tokens
    assert found.prefill_chunk == min(tokens // 16 * 16, 2048 if gpu else 128)


def test_no_more_rows_than_a_pool_that_was_set_can_serve() -> None:
    for blocks, rows in ((2, 1), (9, 8), (1000, 64)):
        config = msgspec.structs.replace(ON_CPU, num_blocks=blocks)
        found, _ = with_sizes(config, None, LLAMA_8B)
        check_config(found)
        assert found.max_rows == rows


def test_a_start_says_what_was_chosen_and_why() -> None:
    with capture_logs() as events:
        parts = assemble(EngineConfig(model=str(BUNDLED), max_rows=3, threads=1), lambda done, total: None)
    parts.device.close()
    (said,) = [event for event in events if event["event"] == "sizes"]
    assert {name: said[name] for name in NAMES} == {
        "max_rows": 3, "prefill_chunk": 128, "max_prefill_tokens": 256, "run_ahead_tokens": 512,
    }  # fmt: skip
    assert said["why"] == "what a CPU gets; set: max_rows"
    prompts = parts.info.prompt_launches
    assert (prompts.chunk, prompts.launch, prompts.queued, prompts.why) == (128, 256, 512, said["why"])
    assert parts.scheduler.limits.max_prefill_tokens == 256
    assert parts.scheduler.ledger.run_ahead_tokens == 512
