"""The CUDA device under a whole engine: captured graphs, run-ahead, marks, faults."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.cuda_device import CudaDevice
from runahead.cuda_graphs.device import DeviceError, Form, LaunchShape
from runahead.cuda_graphs.rings import FAULT_PLAN_NUMBER, STATUS_FAULT
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.gpu.gpu_chain import (
    EngineUnderTest,
    check_depth,
    cpu_engine,
    cuda_engine,
    random_requests,
    random_weights,
    small_config,
)
from tests.runtime.chain import tell_of_marks_one_by_one
from tests.runtime.kernels.triton_device import synchronising_calls_raise

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LAUNCHES = 100
ROWS = 8


def served(under_test: EngineUnderTest, count: int, seed: int) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and finish reasons of random requests, arriving in two waves."""
    requests = random_requests(gpu_chain.small_config(), count, seed)
    for handle, request in enumerate(requests[: count // 2]):
        under_test.submit(handle, *request)
    for _ in range(6):
        under_test.engine.turn()
    for handle, request in enumerate(requests[count // 2 :], start=count // 2):
        under_test.submit(handle, *request)
    under_test.run()
    under_test.engine.drain("test")  # compares the device's rows with the host's
    under_test.device.close()
    return under_test.tokens(), under_test.reasons()


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"architecture": "Qwen3ForCausalLM", "windows": (0, 20), "num_kv_heads": 1, "head_dim": 24}],
    ids=["llama", "normed, sliding"],
)
def test_the_tokens_of_the_host_device_at_every_depth(run_ahead: int, changes: dict[str, object]) -> None:
    config = small_config(**changes)
    weights = random_weights(config)
    expected = served(cpu_engine(config, weights, 2), 24, seed=11)
    under_test = cuda_engine(config, weights, run_ahead)
    tell_of_marks_one_by_one(under_test.device)
    found = served(under_test, 24, seed=11)
    assert found == expected
    assert len(found[1]) == 24
    check_depth(under_test, run_ahead)
    counters = under_test.device.counters
    kinds = under_test.engine.figures.launches_by_kind
    assert counters.graph_replays == sum(kinds.values()), "S of every launch is in a graph"
    assert kinds["mixed"] > 0 and kinds["decode"] > 0
    assert dict(counters.fallbacks) == {"closing": kinds["closing"]}, "chunks are in graphs"


def steady(run_ahead: int, dtype: torch.dtype = torch.float32) -> EngineUnderTest:
    """ROWS rows that decode for a long time, the prompts behind them."""
    config = small_config(max_position_embeddings=1024, dtype=dtype)
    under_test = cuda_engine(config, random_weights(config, dtype), run_ahead, max_rows=ROWS, num_blocks=600)
    for handle in range(ROWS):
        sampling = SamplingParams(temperature=0.0 if handle % 2 else 0.8, seed=handle)
        under_test.submit(handle, [2 + handle] * 20, sampling, StoppingParams(max_tokens=900, ignore_eos=True))
    while under_test.engine.scheduler.tally.counters["generated_tokens"] < 5 * ROWS:
        under_test.engine.turn()
    return under_test


def finish(under_test: EngineUnderTest) -> None:
    under_test.links.tell(1, m.Abort(1, (), True))
    under_test.run()
    under_test.device.close()


def turn_for(under_test: EngineUnderTest, launches: int) -> None:
    first = under_test.engine.ledger.committed
    while under_test.engine.ledger.committed < first + launches:
        under_test.engine.turn()


def test_a_decode_launch_is_one_graph() -> None:
    under_test = steady(2)
    counters = under_test.device.counters
    replays, fallbacks = counters.graph_replays, counters.fallbacks.total()
    first = under_test.engine.ledger.launched
    turn_for(under_test, LAUNCHES)
    assert counters.graph_replays - replays == under_test.engine.ledger.launched - first
    assert counters.fallbacks.total() == fallbacks
    for form in Form:
        key = under_test.device.launch_key(ROWS, form)  # type: ignore[attr-defined]
        nodes = under_test.device.graphs.nodes(key)  # type: ignore[attr-defined]
        print(f"decode launch of {ROWS} rows, 2 layers, {form}: one graph of {nodes} nodes")
        assert nodes > 10
    finish(under_test)


def test_no_call_of_a_steady_decode_synchronises() -> None:
    under_test = steady(2)
    with synchronising_calls_raise():
        turn_for(under_test, LAUNCHES)
    with synchronising_calls_raise(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.zeros(1, device="cuda").item()  # the mode was on
    finish(under_test)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_a_profile_of_a_steady_decode_holds_no_synchronising_call() -> None:
    under_test = steady(2)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        turn_for(under_test, 5)
        with torch.profiler.record_function("steady"):
            first = under_test.engine.ledger.launched
            turn_for(under_test, LAUNCHES)
            launched = under_test.engine.ledger.launched - first
    (window,) = [event for event in profile.events() if event.name == "steady" and event.device_type.name == "CPU"]
    calls: dict[str, int] = {}
    for event in profile.events():
        inside = window.time_range.start <= event.time_range.start <= window.time_range.end
        if inside and event.device_type.name == "CPU" and event.name.startswith(("cuda", "cu")):
            calls[event.name] = calls.get(event.name, 0) + 1
    print(f"calls of {LAUNCHES} launches: {calls}")
    assert calls.get("cudaGraphLaunch", 0) == launched >= LAUNCHES - under_test.engine.ledger.run_ahead
    waiting = [name for name in calls if "Synchronize" in name or "Memcpy" in name or "Malloc" in name]
    assert not waiting, calls
    finish(under_test)


def test_a_steady_launch_reads_no_more_than_a_header() -> None:
    under_test = steady(2)
    device = under_test.device
    turn_for(under_test, 1)
    rows = under_test.engine.scheduler.rows
    blocks, first = int(rows.num_blocks.sum()), device.ended()
    bytes_read = device.counters.bytes_to_device
    turn_for(under_test, LAUNCHES)
    launches = device.ended() - first
    appends = int(rows.num_blocks.sum()) - blocks
    assert launches >= LAUNCHES - 5
    assert device.counters.bytes_to_device - bytes_read <= 64 * launches + 12 * (appends + ROWS)
    assert device.counters.bytes_to_device - bytes_read >= 64 * launches
    finish(under_test)


def target_output(run_ahead: int, place: int, seed: int) -> tuple[list[int], list[tuple[float, ...]]]:
    """Tokens and log-probabilities, as bits, of one bfloat16 request among seven others in a bucket of eight rows.

    Prompts have one token each, so that every launch is a decode launch of the same bucket.
    """
    config = small_config(dtype=torch.bfloat16)
    under_test = cuda_engine(config, random_weights(config, torch.bfloat16), run_ahead, max_rows=ROWS)
    dice = np.random.default_rng(seed)
    for handle in range(ROWS):
        mine = handle == place
        prompt = [7] if mine else [int(dice.integers(2, config.vocab_size))]
        sampling = SamplingParams(temperature=0.9, seed=5 if mine else int(dice.integers(1 << 40)), logprobs=2)
        under_test.submit(handle, prompt, sampling, StoppingParams(max_tokens=60, ignore_eos=True))
    under_test.run()
    under_test.device.close()
    logprobs = []
    for _, message in under_test.links.sent:
        if isinstance(message, m.Output):
            handles = np.frombuffer(message.handles, np.int64)
            for entry in message.logprobs:
                if handles[entry.index] == place:
                    logprobs.append((entry.chosen, *entry.top_logprobs))
    return under_test.tokens()[place], logprobs


def test_class_a_the_same_bits_whatever_the_neighbours_the_slot_and_the_depth() -> None:
    expected = target_output(0, place=0, seed=1)
    assert len(expected[0]) == len(expected[1]) == 60
    for run_ahead, place, seed in ((0, 5, 2), (1, 3, 3), (2, 7, 4), (4, 1, 5)):
        assert target_output(run_ahead, place, seed) == expected, (run_ahead, place, seed)


def test_a_row_whose_cache_holds_nan_fails_alone() -> None:
    under_test = steady(2)
    victim = under_test.engine.scheduler.holdings.by_slot[3]
    assert victim is not None
    with torch.cuda.stream(under_test.device.stream):  # type: ignore[attr-defined]
        under_test.program.poison_blocks((victim.blocks[0],))
    turn_for(under_test, 20)
    assert under_test.reasons() == {victim.handle: FinishReason.NON_FINITE}
    assert len(under_test.engine.scheduler.holdings.requests()) == ROWS - 1
    finish(under_test)


def test_a_launch_without_its_plan_masks_every_row_and_reports_a_fault() -> None:
    config = small_config()
    under_test = cuda_engine(config, random_weights(config), 2)
    device = under_test.device
    device.launch(LaunchShape(1, 0, Form.PLAIN, rows=2, tokens=2, is_decode=True))
    device.wait(1 << 62, 0, (), 5.0)
    assert device.ended() == 1
    assert device.rings.status[1, STATUS_FAULT] == FAULT_PLAN_NUMBER
    device.close()


def test_a_launch_that_raises_is_a_device_error_now_and_ever_after() -> None:
    config = small_config()
    under_test = cuda_engine(config, random_weights(config), 2)
    device = under_test.device
    device.graphs.clear()  # type: ignore[attr-defined]
    with pytest.raises(DeviceError):
        device.launch(LaunchShape(1, 0, Form.PLAIN, rows=2, tokens=2, is_decode=True))
    with pytest.raises(DeviceError):
        device.sampled()
    device.close()


def test_a_wait_ends_when_a_descriptor_is_readable_or_time_is_up() -> None:
    import os

    config = small_config()
    device = cuda_engine(config, random_weights(config), 2).device
    device.wait(0, 0, (), 0.01)
    read, write = os.pipe()
    os.write(write, b"x")
    device.wait(0, 0, (read,), 30.0)
    os.close(read)
    os.close(write)
    assert device.counters.waits == 2
    device.close()


# ---------------------------------------------------------------- idle inside launches that are no graph

STALL_S = 0.02
IN_PIECES = LaunchShape(1, 0, Form.PLAIN, rows=1, tokens=20, is_decode=False, prompt_logprobs=True)


def launched_alone(under_test: EngineUnderTest) -> int:
    """One launch in pieces without a plan: every row is masked. Its idle time inside, in ns."""
    device = under_test.device
    device.launch(IN_PIECES)
    device.wait(1 << 62, 0, (), 30.0)
    assert device.ended() == 1
    return int(device.rings.idle_ns[1])


def test_a_host_that_stalls_between_two_layers_of_a_launch_in_pieces_shows_as_idle_time_inside_it() -> None:
    config = small_config()
    under_test = cuda_engine(config, random_weights(config), 2)
    forward = under_test.program.forward

    def stalled(shape: LaunchShape, between: Callable[[], None]) -> None:
        def stall() -> None:
            between()
            torch.cuda.current_stream().synchronize()  # the device has run dry
            time.sleep(STALL_S)

        forward(shape, stall)

    under_test.program.forward = stalled
    idle_ns = launched_alone(under_test)
    rings = under_test.device.rings
    print(f"idle inside: {idle_ns / 1e6:.2f} ms of {(rings.end_ns[1] - rings.start_ns[1]) / 1e6:.2f} ms busy")
    assert idle_ns >= config.num_layers * STALL_S * 1e9
    under_test.device.close()


def test_a_launch_in_pieces_that_is_in_the_queue_before_the_device_comes_to_it_is_not_idle_inside() -> None:
    config = small_config()
    under_test = cuda_engine(config, random_weights(config), 2)
    with torch.cuda.stream(under_test.device.stream):  # type: ignore[attr-defined]
        torch.cuda._sleep(4_000_000_000)  # about two seconds
    assert launched_alone(under_test) == 0
    under_test.device.close()


def test_a_steady_decode_of_captured_launches_is_never_idle_inside() -> None:
    under_test = steady(2)
    turn_for(under_test, 10)
    figures = under_test.engine.figures
    before, retired = figures.idle_inside_ns, figures.retired
    assert before == 0, "its prompts were in graphs too"
    turn_for(under_test, LAUNCHES)
    assert figures.retired > retired
    assert figures.idle_inside_ns == before
    finish(under_test)


def test_decode_launches_without_their_graphs_bring_the_same_tokens() -> None:
    config = small_config()
    weights = random_weights(config)
    expected = served(cuda_engine(config, weights, 2), 24, seed=11)
    under_test = cuda_engine(config, weights, 2)
    device = under_test.device
    assert isinstance(device, CudaDevice)
    launch, eagerly = device.launch, []

    def without_graph(shape: LaunchShape) -> None:
        if shape.is_decode and not shape.prompt_logprobs:
            eagerly.append(shape.number)
            device.launch_eagerly(shape)
        else:
            launch(shape)

    device.launch = without_graph  # type: ignore[method-assign]
    assert served(under_test, 24, seed=11) == expected
    assert len(eagerly) > 20
    launches = sum(under_test.engine.figures.launches_by_kind.values())
    assert device.counters.graph_replays == launches - len(eagerly)
