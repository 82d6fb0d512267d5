"""The CUDA device's own code without a GPU: its program in Triton's interpreter, graphs that are played by doing what
they hold once more, marks that the host writes. What it does with a GPU's memory and queue is shown in tests/gpu alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="there tests/gpu has the device itself"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

from runahead.cuda_graphs import cuda_device, marks  # noqa: E402
from runahead.cuda_graphs.buckets import GraphKey  # noqa: E402
from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings  # noqa: E402
from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.tail import TailPlacement  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from runahead.runtime.programs.cuda.program import TritonProgram  # noqa: E402
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams  # noqa: E402
from tests.gpu import gpu_chain, test_masks_on_cuda  # noqa: E402
from tests.gpu.test_drafts_on_cuda import FORMS  # noqa: E402
from tests.runtime.kernels import masked_engine  # noqa: E402

ROWS, NUM_BLOCKS, RUN_AHEAD = 2, 33, 2
MAX_PREFILL_TOKENS: Final = 32  # each takes the interpreter its time, in every launch that is warmed up
TOKENS: Final = ROWS + MAX_PREFILL_TOKENS
CONFIG = gpu_chain.small_config(intermediate_size=64, num_layers=1, windows=(0,), max_position_embeddings=128)
Happened = tuple[int, int, bool]  # an F: its query tokens, its rows, whether it leaves log-probabilities of prompts
EMPTIED: Final[Happened] = (-1, 0, False)  # the allocator gave back what nobody used


class Queue:
    """In the place of a stream and of an event: all that was enqueued has ended."""

    def __init__(self, **_: Any) -> None:
        pass

    def wait_stream(self, other: Queue) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Played:
    """A `GraphPool` that keeps what a graph would hold."""

    def __init__(self, stream: Queue) -> None:
        self._held: dict[GraphKey, Callable[[], None]] = {}
        self.replayed: list[GraphKey] = []

    def capture(self, key: GraphKey, work: Callable[[], None]) -> None:
        torch.cuda.empty_cache()  # as a capture begins
        self._held[key] = work

    def replay(self, key: GraphKey) -> None:
        self._held[key]()
        self.replayed.append(key)

    def fastest_ms(self, key: GraphKey) -> float:
        self._held[key]()
        return 2.0 if key.rows == 1 and not key.tokens else 16.0

    def nodes(self, key: GraphKey) -> int:
        return 40

    def clear(self) -> None:
        self._held.clear()


class OnTheCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        return function(*args, **named)


def _start(counter: torch.Tensor, start_ns: torch.Tensor) -> None:
    counter += 1
    start_ns[int(counter) % len(start_ns)] = time.monotonic_ns()


def _sampled(counter: torch.Tensor, said: torch.Tensor, *, in_tail: bool) -> None:
    if in_tail:
        _tail(counter, said)
    said[marks.SAMPLED] = int(counter)


def _tail(counter: torch.Tensor, said: torch.Tensor) -> None:
    assert said[marks.TAIL] == int(counter) - 1, "each launch marks its tail once"
    said[marks.TAIL] = int(counter)


def _ended(counter: torch.Tensor, said: torch.Tensor, end_ns: torch.Tensor) -> None:
    end_ns[int(counter) % len(end_ns)] = time.monotonic_ns()
    assert said[marks.TAIL] == int(counter)
    said[marks.ENDED] = int(counter)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Happened]]:
    """When the allocator was emptied, and the launches whose F ran, in their order."""
    found: list[Happened] = []
    gpu = {"Stream": Queue, "Event": Queue, "current_stream": Queue, "stream": lambda stream: nullcontext()}
    gpu |= {"mem_get_info": lambda: (1 << 30, 1 << 31), "empty_cache": lambda: found.append(EMPTIED)}
    for name, stand_in in gpu.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, stand_in in {"start": _start, "sampled": _sampled, "tail": _tail, "ended": _ended}.items():
        monkeypatch.setattr(marks, name, stand_in)
    monkeypatch.setattr(gpu_chain, "MAX_PREFILL_TOKENS", MAX_PREFILL_TOKENS)
    monkeypatch.setattr(cuda_device, "GraphPool", Played)
    monkeypatch.setattr(cuda_device, "pinned", lambda shape, dtype: np.zeros(shape, dtype))
    with OnTheCpu():
        yield found


def played_engine(happened: list[Happened], *, is_trial: bool = False) -> gpu_chain.EngineUnderTest:
    rings = allocate_mapped_rings(gpu_chain.layout_for(RUN_AHEAD, ROWS))
    program = TritonProgram(
        Decoder(CONFIG, gpu_chain.random_weights(CONFIG), TritonKernelSet()), rings, max_rows=ROWS, max_tokens=TOKENS,
        num_blocks=NUM_BLOCKS, block_size=gpu_chain.BLOCK_SIZE, context_length=CONFIG.max_position_embeddings,
        penalty_slots=gpu_chain.PENALTY_SLOTS,
    )  # fmt: skip
    forward = program._forward_rows

    def told(shape: LaunchShape, *between: Any, briefly: bool = False) -> None:
        happened.append((shape.tokens, shape.rows, shape.prompt_logprobs))
        forward(shape, *between, briefly=briefly)

    program._forward_rows = told  # type: ignore[assignment, method-assign]
    device = CudaDevice(program, rings, max_rows=ROWS, mixed_tokens=TOKENS, is_trial=is_trial)
    return gpu_chain.engine_over(CONFIG, device, program, RUN_AHEAD, ROWS, NUM_BLOCKS)


def served(under_test: gpu_chain.EngineUnderTest) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and reasons of requests of many kinds, one of which asks for log-probabilities of its prompt."""
    for handle, (prompt, sampling, stopping) in enumerate(gpu_chain.random_requests(CONFIG, 3, seed=11)):
        short = msgspec.structs.replace(stopping, max_tokens=min(stopping.max_tokens, 4))
        under_test.submit(handle, prompt[:40], sampling, short)
    under_test.submit(9, range(5, 25), SamplingParams(temperature=0.0, prompt_logprobs=1), StoppingParams(max_tokens=2))
    with torch.inference_mode():
        under_test.run()
        under_test.engine.drain("test")  # compares the device's rows with the host's
    under_test.device.close()
    return under_test.tokens(), under_test.reasons()


def test_a_device_that_holds_the_memory_of_its_largest_launch_serves_as_if_it_had_not(happened: list[Happened]) -> None:
    expected = served(gpu_chain.cpu_engine(CONFIG, gpu_chain.random_weights(CONFIG), RUN_AHEAD, max_rows=ROWS))
    under_test = played_engine(happened)
    device = under_test.device
    assert isinstance(device, CudaDevice)
    begun = happened.index(EMPTIED)
    assert max(tokens for tokens, *_ in happened[:begun]) == TOKENS
    device.hold_memory()
    since = happened[len(happened) - happened[::-1].index(EMPTIED) :]
    largest, others = since[:3], since[3:]
    assert largest == [(TOKENS, ROWS, False), (TOKENS, 1, False), (TOKENS, ROWS, True)], (
        "nothing is given back any more"
    )
    assert others == [(tokens, ROWS, False) for tokens in (TOKENS, 32)], "all that launches in pieces may have"
    del happened[:]
    assert (device.sampled(), device.ended()) == (0, 0)
    assert served(under_test) == expected
    assert [one for one in happened if one[2]] == [(32, ROWS, True)], "20 tokens that were asked about, a row, padding"
    counters, kinds = device.counters, under_test.engine.figures.launches_by_kind
    assert dict(counters.fallbacks) == {"closing": kinds["closing"], "prompt_logprobs": 1}
    assert counters.graph_replays == sum(kinds.values()), "S of every launch is in a graph"
    assert counters.graph_captures == len(device.graph_buckets.every_key())


def test_a_launch_whose_tail_begins_after_some_layers_serves_as_any_other(
    happened: list[Happened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The played marks check that each launch marks its tail once, before its end; launches in pieces do, too. Of
    decode launches and of those with prompts there are some of either kind."""
    expected = served(gpu_chain.cpu_engine(CONFIG, gpu_chain.random_weights(CONFIG), RUN_AHEAD, max_rows=ROWS))
    places: list[tuple[int, float]] = []

    def placed(self: TailPlacement, tokens: int) -> int:
        places.append((self.layers, self.least_ms))
        return int(tokens in (1, 32))  # the launch in pieces has 32, too

    monkeypatch.setattr(TailPlacement, "layers_before", placed)
    under_test = played_engine(happened)
    del happened[:]
    assert served(under_test) == expected
    assert places[-1] == (CONFIG.num_layers, 2.0), "counted and measured before the graphs were captured"
    assert {tokens for tokens, *_ in happened} >= {1, ROWS, 32, TOKENS}
    assert under_test.engine.device.in_tail() == under_test.engine.ledger.tail == under_test.engine.ledger.launched


def test_a_trial_runs_and_captures_the_largest_launches_alone(happened: list[Happened]) -> None:
    device = played_engine(happened, is_trial=True).device
    assert isinstance(device, CudaDevice)
    assert device.counters.graph_captures == len(device.graph_buckets.largest_keys()) < 5
    launched = [one for one in happened if one != EMPTIED]
    assert {tokens for tokens, *_ in launched if tokens > ROWS} == {TOKENS}


def test_a_head_beside_grammars_finds_every_launch_among_the_graphs_that_were_captured(
    happened: list[Happened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine of the tests on a GPU, as it is there: exact, in bfloat16, masks late. Some of its launches leave
    the head's steps out."""
    monkeypatch.setattr(CudaDevice, "_warm_up", lambda device, *given: None)  # it takes its time here
    monkeypatch.setattr(gpu_chain, "moved", lambda weights, device: weights)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    short = StoppingParams(max_tokens=6)
    asked = [(prompt, drawn, short, grammar) for prompt, drawn, _, grammar in masked_engine.long_requests()[:3]]
    with torch.inference_mode():
        expected = masked_engine.served(test_masks_on_cuda.engine(0, 0), asked)
        under_test = test_masks_on_cuda.engine(2, 2, guesses=True, forced=FORMS[0], has_head=True)
        found = masked_engine.served(under_test, asked)
    assert found[:2] == expected[:2]
    stats, graphs = under_test.engine.stats(), under_test.device.graphs  # type: ignore[attr-defined]
    assert stats.held_rows > 0 and stats.accepted[1] > 0
    assert {key.forced for key in graphs.replayed if key.drafts} == {False, True}
    assert set(stats.fallbacks) <= {"closing", "drafts"}
