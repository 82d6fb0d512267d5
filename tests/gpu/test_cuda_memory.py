"""A start on a GPU whose memory is taken for real: by the test, before the start or in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.cuda_graphs.cuda_device import free_bytes
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process import cuda
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.parts import Assembled
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest
from tests.runtime.chain import MemoryLinks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BUNDLED = Path(__file__).parents[2] / "runtime" / "models" / "bundled"
MIB = 1 << 20
SPARE = 256 * MIB  # for graphs that the trial does not capture, among others; a start has three times as much at least
# All of these rows at full length need more KV blocks than the memory that is left to the start holds.
CONFIG = EngineConfig(model=str(BUNDLED), device="cuda", max_rows=512, max_prefill_tokens=2048)
LEFT = 3000 * MIB


class Thief:
    """Takes all free memory when the capture of graphs begins, the first `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.held: list[torch.Tensor] = []

    def __call__(self, done: int, total: int) -> None:
        if done == 0 and self.times:
            self.times -= 1
            self.held.append(taken(free_bytes() - 2 * MIB))
            with suppress(torch.OutOfMemoryError):
                while True:
                    self.held.append(taken(2 * MIB))


def taken(size: int) -> torch.Tensor:
    return torch.empty(max(0, size), dtype=torch.uint8, device="cuda")


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LEFT bytes, of which a start leaves SPARE alone."""
    monkeypatch.setattr(cuda, "overhead", lambda memory: SPARE)
    held = taken(free_bytes() - LEFT)
    yield
    del held
    free_bytes()


def start(thief: Thief) -> tuple[Assembled, list[dict[str, Any]]]:
    with capture_logs() as events:
        parts = assemble(CONFIG, lambda done, total: None, thief)
    return parts, [dict(event) for event in events]


def answers(parts: Assembled) -> int:
    """Tokens that the engine makes of some prompts."""
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=100, run_ahead_asked=2)
    under_test = EngineUnderTest(engine, parts.device, None, links)
    for handle in range(8):
        prompt = [(37 * handle + 11 * i) % 4000 + 1 for i in range(5 + 170 * handle)]
        under_test.submit(
            handle, prompt, SamplingParams(temperature=0.0), StoppingParams(max_tokens=8, ignore_eos=True)
        )
    under_test.run()
    return sum(len(tokens) for tokens in under_test.tokens().values())


@pytest.mark.usefixtures("little_memory")
def test_the_pool_takes_what_a_trial_leaves_and_the_sum_is_logged() -> None:
    parts, events = start(Thief(0))
    memory = next(event for event in events if event["event"] == "memory")
    after = next(event for event in events if event["event"] == "memory_taken")
    print(memory, after, sep="\n")
    assert not [event for event in events if event["event"] == "memory_ran_out"]
    needs = sum(memory[name] for name in ("buffer_bytes", "launch_bytes", "graph_bytes", "overhead_bytes"))
    block = memory["kv_bytes"] // parts.info.num_blocks
    assert 0 <= memory["free_bytes"] - needs - memory["kv_bytes"] < block, "as large as memory allows"
    assert min(memory["buffer_bytes"], memory["graph_bytes"], after["graph_bytes"]) > 0
    assert after["free_bytes"] > 0
    assert answers(parts) == 8 * 8
    parts.device.close()


@pytest.mark.usefixtures("little_memory")
def test_memory_that_is_gone_when_graphs_are_captured_is_met_with_a_smaller_pool() -> None:
    thief = Thief(1)
    parts, events = start(thief)
    said = next(event for event in events if event["event"] == "memory_ran_out")
    assert parts.info.num_blocks == said["blocks_next"] == said["blocks"] * 9 // 10
    thief.held.clear()
    assert answers(parts) == 8 * 8
    parts.device.close()


@pytest.mark.usefixtures("little_memory")
def test_memory_that_is_gone_twice_is_a_sentence_and_all_of_it_comes_back() -> None:
    thief = Thief(2)
    with pytest.raises(ConfigError, match=r"memory ran out: the weights take \d+ MiB, \d+ KV blocks \d+ MiB, buffers"):
        start(thief)
    thief.held.clear()
    assert free_bytes() > LEFT - 600 * MIB, "but for loaded kernels and libraries"
