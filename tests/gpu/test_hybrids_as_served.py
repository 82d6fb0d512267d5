"""Hybrids on a GPU as the service makes their engine, from a folder and settings alone: what the CPU says in float32,
what a request says alone in bfloat16; and through the service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from runahead.cuda_graphs.device import Form
from runahead.runtime.engine.loop import Engine
from runahead.runtime.process.assemble import assemble
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu.gpu_chain import EngineUnderTest
from tests.gpu.small_checkpoints import save_granite_hybrid, save_qwen3_next
from tests.parity.client import Answer, stats_at_rest
from tests.parity.services import run_everywhere, services_at_every_depth
from tests.parity.workload import workload
from tests.runtime.chain import MemoryLinks, tell_of_marks_one_by_one
from tests.runtime.kernels.triton_device import synchronising_calls_raise
from tests.runtime.process import test_neighbours_change_nothing as neighbours

LOGPROB_TOLERANCE: Final = 2e-3
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CHUNK: Final = 64
SNAPSHOT_BLOCKS: Final = 4  # of 16 tokens: where sub-chunks of bfloat16 end
PREFIX: Final = 2 * CHUNK + 7  # tokens that some prompts begin with, the last ones behind the last snapshot


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_granite_hybrid(tmp_path_factory.mktemp("granite"))


def config_of(folder: Path, device: DeviceName, run_ahead: int, **changes: object) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device=device, run_ahead=run_ahead, max_rows=8, context_length=512, prefill_chunk=CHUNK,
        max_prefill_tokens=2 * CHUNK, run_ahead_tokens=512, state_snapshot_blocks=SNAPSHOT_BLOCKS, **changes,  # type: ignore[arg-type]
    )  # fmt: skip


def engine_of(config: EngineConfig) -> EngineUnderTest:
    parts = assemble(config, lambda done, total: None)
    tell_of_marks_one_by_one(parts.device)
    links = MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=100, run_ahead_asked=config.run_ahead)
    return EngineUnderTest(engine, parts.device, None, links)


def greedy(folder: Path, device: DeviceName, run_ahead: int) -> tuple[dict[int, list[int]], EngineStats]:
    """Tokens of prompts in two waves; those of the second begin as some of the first do."""
    under_test = engine_of(config_of(folder, device, run_ahead, dtype="float32"))
    for wave in range(2):
        for handle in range(10 * wave, 10 * (wave + 1)):
            common = [(29 * i + 3) % 4000 + 1 for i in range(PREFIX)] if handle % 3 == 0 else []
            prompt = common + [(37 * handle + 11 * i) % 4000 + 1 for i in range(5 + 17 * (handle % 10))]
            stopping = StoppingParams(max_tokens=30, ignore_eos=True)
            under_test.submit(handle, prompt, SamplingParams(temperature=0.0), stopping)
        under_test.run()
    under_test.engine.drain("test")  # compares the device's rows and snapshots with the host's
    stats = under_test.engine.stats()
    under_test.device.close()
    return under_test.tokens(), stats


def test_in_float32_it_says_what_the_cpu_says_behind_snapshots_too(granite: Path) -> None:
    expected, _ = greedy(granite, "cpu", 2)
    assert len({tuple(tokens) for tokens in expected.values()}) > 10, "as if prompts meant nothing"
    for run_ahead in (0, 2, 4):
        found, stats = greedy(granite, "cuda", run_ahead)
        assert found == expected, f"launches ahead: {run_ahead}"
        assert min(stats.snapshots_kept, stats.snapshots_found, stats.launches_by_kind["mixed"]) > 0
        assert set(stats.fallbacks) == {"closing"} and stats.ledger_depth_max == max(1, run_ahead)


def asked(seed: int) -> list[neighbours.Asked]:
    """Greedy and sampled requests; every third prompt begins as the others of these do."""
    dice = random.Random(seed)
    common = [dice.randrange(2, neighbours.VOCAB) for _ in range(PREFIX)]
    found = []
    for i in range(12):
        prompt = (common if i % 3 == 0 else []) + [
            dice.randrange(2, neighbours.VOCAB) for _ in range(dice.randint(1, 200))
        ]
        sampling = SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, logprobs=(2, -1)[i % 2])
        stopping = StoppingParams(dice.randint(10, 30), min_tokens=5, stop_token_ids=neighbours.COMMON[: 5 * (i % 3)])
        found.append(neighbours.Asked(prompt, sampling, stopping))
    return found


def alike(config: EngineConfig, depths: Sequence[int]) -> None:
    """Every request says the same to the bit alone, one after the other, and among others at each of the depths."""
    requests = asked(5)
    alone, quiet = neighbours.answered(config, requests, range(len(requests)), 1 << 30)
    assert quiet.snapshots_found >= 3, "nobody began with a snapshot"
    for run_ahead in depths:
        order = range(len(requests))[:: 1 if run_ahead % 4 == 0 else -1]
        ahead = config_of(Path(config.model), "cuda", run_ahead, dtype="bfloat16", load_format=config.load_format)
        crowded, stats = neighbours.answered(ahead, requests, order, 3)
        assert stats.launches < quiet.launches / 2, "they did not run together"
        assert stats.events["admitted"].idle < len(requests) / 2, "no prompt was computed beside rows that decode"
        assert stats.ledger_depth_max == max(1, run_ahead)
        differing = [place for place in range(len(requests)) if crowded[place].said != alone[place].said]
        assert differing == [], f"launches ahead: {run_ahead}"


def test_a_request_says_what_it_says_alone(granite: Path) -> None:
    """Mamba-2, behind snapshots or not, as it comes."""
    alike(config_of(granite, "cuda", 2, dtype="bfloat16"), (0, 1, 2, 4))


def test_a_request_to_gated_delta_nets_says_what_it_says_alone(tmp_path: Path) -> None:
    folder = save_qwen3_next(tmp_path)
    alike(config_of(folder, "cuda", 2, dtype="bfloat16", load_format="dummy"), (4,))


def test_a_steady_launch_is_one_graph_reads_64_bytes_and_waits_for_nobody(granite: Path) -> None:
    rows = 8
    under_test = engine_of(config_of(granite, "cuda", 2))
    for handle in range(rows):
        stopping = StoppingParams(max_tokens=400, ignore_eos=True)
        under_test.submit(handle, [2 + handle] * 20, SamplingParams(temperature=0.0), stopping)
    while under_test.engine.scheduler.tally.counters["generated_tokens"] < 5 * rows:
        under_test.engine.turn()
    counters, ledger = under_test.device.counters, under_test.engine.ledger
    replays, fallbacks, first, read = (
        counters.graph_replays,
        counters.fallbacks.total(),
        ledger.launched,
        counters.bytes_to_device,
    )
    with synchronising_calls_raise():
        while ledger.committed < first + 50:
            under_test.engine.turn()
    launches = ledger.launched - first
    assert counters.graph_replays - replays == launches
    assert counters.fallbacks.total() == fallbacks
    blocks = rows * (launches // 16 + 1)  # a block is sent for each 16 tokens of a row, and with some a snapshot
    assert counters.bytes_to_device - read <= 64 * (launches + 2) + 2 * 12 * blocks
    key = under_test.device.launch_key(rows, Form.PLAIN)  # type: ignore[attr-defined]
    print(f"decode launch of {rows} rows: {under_test.device.graphs.nodes(key)} nodes")  # type: ignore[attr-defined]
    under_test.links.tell(1, m.Abort(1, (), True))
    under_test.run()
    under_test.device.close()


def agree(one: Answer, other: Answer) -> bool:
    """The same tokens, as far as both went, and log-probabilities within rounding of each other."""
    common = min(len(one.tokens), len(other.tokens))
    if one.tokens[:common] != other.tokens[:common]:
        return False
    for (ours, _), (theirs, _) in zip(one.logprobs, other.logprobs, strict=False):
        assert ours is not None and theirs is not None and abs(ours - theirs) <= LOGPROB_TOLERANCE
    return True


def test_through_the_service_it_says_what_the_cpu_says(granite: Path) -> None:
    """Two workloads, aborts and cancellations among them. A near tie may go another way in one answer of a hundred."""
    of_device = (["--device", "cuda"], ["--device", "cpu", "--threads", "1"])
    flags = ["--model", str(granite), "--dtype", "float32", "--state-snapshot-blocks", "2"]
    depths = ("2", "1")  # of the GPU, of the CPU
    with services_at_every_depth(lambda i: [*flags, *of_device[i]], depths) as services:
        differing = compared = 0
        for seed in range(2):
            requests = workload(seed)
            answers = asyncio.run(run_everywhere(services, requests))
            for one, other in zip(answers["1"], answers["2"], strict=True):
                assert other.terminals == (0 if other.cancelled else 1)
                compared += 1
                differing += not agree(one, other)
        stats = asyncio.run(stats_at_rest(services["2"]))
    assert stats.graphs.replays > 0 and stats.chain.launches_by_kind["mixed"] > 0
    print(f"{differing} of {compared} answers differ from the CPU's")
    assert differing <= compared / 100
