"""A model that ranks have between them, on all GPUs or two on one that both share: exchanges to the bit, the tokens of
the engine and of a service, and what becomes of them when a rank is killed or stopped under load."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import msgspec
import pytest
import torch

from benchmarks.local_service import LocalService, started_service
from runahead.runtime.process.rank_start import COMMAND
from runahead.service.settings.server_config import EXIT_BROKEN
from runahead.v1 import (
    GenerateOnceRequest,
    GenerationServiceStub,
    GetModelInfoRequest,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    Structure,
    TokenIds,
    TraceRequest,
)
from tests.gpu.divided_models import DRAFTED, NAMES, saved
from tests.gpu.engine_on_gpus import DEPTHS, LENGTHS, TOKENS, Outcome, prompt, sampling
from tests.gpu.exchanges_on_gpus import RANKS, gpus
from tests.service.service_processes import check_failed_once, engine_of, has_ended, open_streams, running, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROOT = Path(__file__).parents[2]
END_S = 60.0
FLAGS = [
    "--num-blocks", "600", "--max-rows", "8", "--context-length", "2048",
    "--max-prefill-tokens", "512", "--prefill-chunk", "256", "--launch-timeout-s", "5",
]  # fmt: skip


def run(module: str, *arguments: str) -> str:
    """What it prints. The process ends by itself."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def free() -> Iterator[None]:
    """What was free on each GPU is free again."""
    before = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in set(gpus())}
    yield
    for gpu, size in before.items():
        assert torch.cuda.mem_get_info(gpu)[0] >= size - (1 << 30), f"GPU {gpu} is not free"


@pytest.fixture(scope="module")
def defined() -> dict[int, list[int]]:
    """Tokens of some requests by their definition, segments in one process."""
    return defined_tokens("dense")


def defined_tokens(model: str) -> dict[int, list[int]]:
    """By place of the request. model: a name of `divided_models`."""
    return msgspec.json.decode(last_line("tests.gpu.segments_on_gpu", model), type=dict[int, list[int]])


def last_line(module: str, *arguments: str) -> str:
    return run(module, *arguments).strip().splitlines()[-1]


def test_exchanges_give_the_sums_in_rank_order_to_the_bit() -> None:
    """Eagerly and in graphs, with inputs that change from step to step."""
    said = run("tests.gpu.exchanges_on_gpus")
    assert all(f"rank {rank}: 0 exchanges differ" in said for rank in range(RANKS))


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("model", NAMES)
def test_tokens_are_the_same_at_every_depth_alone_and_among_others_until_a_rank_is_killed_under_load(
    model: str,
) -> None:
    """Segments in one process give the same tokens. The engine then fails with a sentence, within the time that a
    launch may take."""
    defined = defined_tokens(model)
    found = msgspec.json.decode(last_line("tests.gpu.engine_on_gpus", model), type=Outcome)
    assert [len(tokens) for tokens in found.alone] == [TOKENS] * len(LENGTHS)
    assert {place: found.alone[place] for place in defined} == defined
    assert (found.accepted > 0) == (model == DRAFTED)
    assert sorted(found.together) == sorted(DEPTHS)
    for depth, (forth, back) in found.together.items():
        assert forth == found.alone, depth
        assert back == found.alone, depth
    assert "rank 1 has ended (signal SIGKILL)" in found.failed
    assert found.failed_s < 10.0


def request(place: int) -> GenerateOnceRequest:
    drawn = sampling(place)
    return GenerateOnceRequest(
        token_ids=TokenIds(ids=prompt(place).tolist()),
        sampling=SamplingOptions(temperature=drawn.temperature, top_p=drawn.top_p, seed=drawn.seed),
        stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
    )


def ranks_of(service: LocalService) -> list[int]:
    """The process ids of the ranks from 1 on."""
    found = running(service, COMMAND[-1])
    assert len(found) == RANKS - 1
    return found


@contextlib.contextmanager
def served(flags: Sequence[str], folder: Path) -> Iterator[LocalService]:
    """A service on all GPUs. Prints the end of its log where the body fails. folder: for a model's files, empty."""
    model = saved("dense", folder)
    flags = [
        "--device", "cuda", "--tensor-parallel", str(RANKS), "--model", model["model"], "--load-format",
        model.get("load_format", "auto"), *flags,
    ]  # fmt: skip
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with started_service(flags, environment=environment, module="tests.gpu.served_on_gpus") as service:
        try:
            yield service
        except BaseException:
            print(service.log.read_text()[-6000:])
            raise


def check_tokens(stub: GenerationServiceStub, defined: dict[int, list[int]]) -> None:
    """All requests at once, then each alone."""
    calls = {place: stub.GenerateOnce.future(request(place), timeout=END_S) for place in defined}
    assert {place: [token.id for token in call.result().tokens] for place, call in calls.items()} == defined
    for place, tokens in defined.items():
        assert [token.id for token in stub.GenerateOnce(request(place), timeout=END_S).tokens] == tokens


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_gives_these_tokens_until_a_rank_dies_or_hangs_which_ends_every_stream_once_and_then_the_server(
    defined: dict[int, list[int]], number: signal.Signals, tmp_path: Path
) -> None:
    with (
        served(FLAGS, tmp_path) as service,
        grpc.insecure_channel(service.url) as channel,
        contextlib.ExitStack() as stack,
    ):
        stub = GenerationServiceStub(channel)
        assert stub.GetModelInfo(GetModelInfoRequest(), timeout=END_S).engine.tensor_parallel == RANKS
        check_tokens(stub, defined)
        structured = GenerateOnceRequest(
            text="x", structure=Structure(regex="[ab]{7}"), stopping=StoppingOptions(max_tokens=20)
        )
        text = stub.GenerateOnce(structured, timeout=END_S).text
        assert len(text) == 7 and set(text) <= {"a", "b"}
        waits = stub.Stats(StatsRequest(), timeout=END_S).stats.chain.rank_wait_s
        assert sorted(waits) == list(range(RANKS))
        assert any(waits.values()), "no rank has waited"
        traced = stub.Trace(TraceRequest(), timeout=END_S).launches
        assert {len(launch.other_ranks) for launch in traced} == {RANKS - 1}
        streams = open_streams(channel)
        ends = [stack.enter_context(watched(process)) for process in (engine_of(service), *ranks_of(service))]
        os.kill(ranks_of(service)[0], number)
        check_failed_once(streams)
        assert service.process.wait(END_S) == EXIT_BROKEN
        assert all(has_ended(end, END_S) for end in ends)
        log = service.log.read_text()
    assert ("rank 1 has ended (signal SIGKILL)" in log) == (number == signal.SIGKILL)
    assert ("has waited too long for rank 1" in log or "launch_hung" in log) == (number == signal.SIGSTOP)


@pytest.mark.usefixtures("free")
def test_a_service_with_default_sizes_gives_these_tokens_and_ends_its_ranks_in_order(
    defined: dict[int, list[int]], tmp_path: Path
) -> None:
    with served([], tmp_path) as service, contextlib.ExitStack() as stack:
        with grpc.insecure_channel(service.url) as channel:
            check_tokens(GenerationServiceStub(channel), defined)
        ends = [stack.enter_context(watched(process)) for process in ranks_of(service)]
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(END_S) == 0
        assert all(has_ended(end, END_S) for end in ends)
