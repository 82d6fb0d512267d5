"""An engine for CUDA from its configuration alone, on the bundled model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire.engine_config import ConfigError, DeviceName, DtypeName, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest
from tests.runtime.chain import MemoryLinks, tell_of_marks_one_by_one

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BUNDLED = Path(__file__).parents[2] / "runtime" / "models" / "bundled"


def served(
    device: DeviceName, run_ahead: int, dtype: DtypeName, counters_from: int = 0
) -> tuple[dict[int, list[int]], EngineUnderTest]:
    """Greedy tokens of twelve prompts, and the engine that made them."""
    config = EngineConfig(
        model=str(BUNDLED),
        device=device,
        dtype=dtype,
        run_ahead=run_ahead,
        max_rows=8,
        prefill_chunk=128,
        max_prefill_tokens=256,
        run_ahead_tokens=512,
        counters_from=counters_from,
    )
    parts = assemble(config, lambda done, total: None)
    tell_of_marks_one_by_one(parts.device)
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=100, poison=parts.poison, run_ahead_asked=run_ahead)
    under_test = EngineUnderTest(engine, parts.device, None, links)
    for handle in range(12):
        prompt = [(37 * handle + 11 * i) % 4000 + 1 for i in range(5 + 17 * handle)]
        under_test.submit(handle, prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=48))
    under_test.run()
    engine.drain("test")
    parts.device.close()
    return under_test.tokens(), under_test


@pytest.mark.parametrize("run_ahead", [0, 2, 4])
def test_the_bundled_model_gives_the_tokens_of_the_cpu_in_float32(run_ahead: int) -> None:
    expected, _ = served("cpu", 2, "float32")
    found, under_test = served("cuda", run_ahead, "float32")
    assert found == expected
    assert sum(len(tokens) for tokens in found.values()) > 100
    assert under_test.device.counters.graph_replays > 0
    stats = under_test.engine.stats()
    full = max(1, run_ahead)
    assert (stats.run_ahead, stats.ledger_depth_max) == (run_ahead, full), "asked and reached"
    assert stats.launches_by_depth[full] > stats.launches / 2
    assert min(stats.graph_captures, stats.graph_replays, stats.launches_by_kind["mixed"]) > 0
    assert set(stats.fallbacks) == {"closing"}
    assert min(stats.bytes_to_device, stats.waits) > 0


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_an_engine_that_begins_shortly_before_a_border_of_its_counters_goes_across(border: int) -> None:
    expected, _ = served("cuda", 2, "float32")
    found, under_test = served("cuda", 2, "float32", counters_from=border - 20)
    assert found == expected
    stats = under_test.engine.stats()
    assert stats.launches > border
    assert stats.launches - (border - 20) == stats.launches_retired


def test_the_bundled_model_runs_in_its_own_dtype() -> None:
    found, under_test = served("cuda", 2, "auto")
    assert sum(len(tokens) for tokens in found.values()) > 100
    assert under_test.device.counters.graph_replays > 0


def test_a_context_longer_than_the_model_s_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "config.json", tmp_path)  # there are no weights to read
    with pytest.raises(ConfigError, match=r"context_length \(2049\) is more than the model's 2048"):
        assemble(EngineConfig(model=str(tmp_path), device="cuda", context_length=2049), lambda done, total: None)


def test_what_the_chain_runs_with_names_the_device_and_the_buckets_that_were_captured() -> None:
    config = EngineConfig(model=str(BUNDLED), device="cuda", run_ahead=3, max_rows=20, max_prefill_tokens=256)
    parts = assemble(config, lambda done, total: None)
    engine = Engine(parts.device, parts.scheduler, MemoryLinks(), max_queue=100, run_ahead_asked=config.run_ahead)
    facts = engine.facts(parts.info)
    parts.device.close()
    assert (facts["run_ahead_asked"], facts["run_ahead"], facts["ring_slots"]) == (3, 3, 5)
    assert (facts["device"], facts["dtype"]) == ("cuda", "bfloat16")
    assert facts["graph_buckets"] == [1, 2, 4, 8, 16, 20]
    assert facts["mixed_buckets"] == [*range(32, 257, 32), 276]


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free hangs on this process's tensors alone. A start reckons by the difference between two looks at what
    is free: tests beside it take memory of the GPU meanwhile and give it back, and the allocator takes 20 MB at a time,
    in which a small model's weights leave room for most of its buffers."""
    of_gpu = torch.cuda.mem_get_info()[1]

    def free_and_all(device: object = None) -> tuple[int, int]:
        return of_gpu - torch.cuda.memory_allocated(), of_gpu

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_all)


@pytest.mark.usefixtures("own_memory")
def test_a_start_with_drafts_and_structures_says_what_they_take() -> None:
    """All that is on the GPU is among the buffers that the trial has found."""
    config = EngineConfig(model=str(BUNDLED), device="cuda", max_rows=64, max_prefill_tokens=256, drafter="ngram")
    with capture_logs() as events:
        parts = assemble(config, lambda done, total: None)
    parts.device.close()
    parts.masks.stop()
    assert (parts.info.structures, parts.info.drafter, parts.info.drafters) == (
        True,
        "ngram",
        ("ngram", "eagle", "model"),
    )
    said = [dict(event) for event in events if event["event"] in ("memory", "memory_taken")]
    print(*said, sep="\n")
    memory = said[0]
    on_gpu = ("run_logits_bytes", "history_bytes", "run_table_bytes", "mask_bytes")
    assert all(memory[name] > 0 for name in (*on_gpu, "mask_host_bytes"))
    assert sum(memory[name] for name in on_gpu) <= memory["buffer_bytes"]
    assert said[1]["free_bytes"] > 0


def test_a_start_that_is_told_no_sizes_chooses_them_for_this_gpu() -> None:
    parts = assemble(EngineConfig(model=str(BUNDLED), device="cuda"), lambda done, total: None)
    parts.device.close()
    prompts = parts.info.prompt_launches
    memory = torch.cuda.mem_get_info()[1]
    assert f"GPUs of {memory / (1 << 30):.0f} GiB" in prompts.why
    if memory >= 64 << 30:
        assert (parts.info.max_rows, prompts.chunk, prompts.launch, prompts.queued) == (256, 2048, 8192, 24_576)
    assert parts.device.buckets[-1] == parts.info.max_rows
    assert parts.device.mixed_buckets[-1] == 512
