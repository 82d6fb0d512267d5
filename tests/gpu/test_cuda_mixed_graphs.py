"""Launches with prompt chunks as captured graphs on a GPU, against the same launches kernel by kernel: the same bits,
over buffers in which an earlier launch has left nonsense."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from runahead.cuda_graphs.buckets import Piece
from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.rings import RingLayout
from runahead.runtime.plan import PLAN_WORDS
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.gpu import gpu_chain
from tests.runtime.kernels.triton_device import synchronising_calls_raise
from tests.runtime.launches import Launches, Outcome, over_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("without_gradients")]

ROWS, BLOCK_SIZE, EACH, MOST_TOKENS = 10, 16, 48, 600
CONFIG = gpu_chain.small_config(
    architecture="Qwen3ForCausalLM",
    intermediate_size=128,
    max_position_embeddings=EACH * BLOCK_SIZE,
    windows=(0, 100),
    dtype=torch.bfloat16,
)

PROMPTS = (65, 655, 590, 530, 32, 14, 93, 45, 512, 555)  # tokens of each row's
# Tokens that each row takes, launch by launch: buckets exactly full, one short and one over, several chunks at once,
# decode rows on either side of a chunk. In the last launch with prompts every row but one decodes, or ends its prompt.
WORK: tuple[dict[int, int], ...] = (
    {4: 31},
    {0: 32},
    {0: 32, 4: 1},
    {2: 50, 5: 13, 4: 1},
    {2: 40, 0: 1, 4: 1, 5: 1},
    {8: 509, 0: 1, 4: 1},
    {2: 500, 0: 1, 4: 1, 5: 1, 8: 3, 6: 6},
    {1: 255, 0: 1},
    {1: 400, 2: 1, 0: 1, 4: 1, 5: 1},
    {3: 513},
    {9: 555, 0: 1, 4: 1},
    {0: 1, 1: 1, 3: 17, 6: 3, 7: 44},
    {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 7: 1, 6: 84},
    {0: 1, 1: 1, 2: 1, 4: 1},
    {},
)
TOKENS = [31, 32, 33, 64, 43, 511, 512, 256, 404, 513, 557, 66, 90, 4, 0]


class Stage:
    """Launches by hand on a CUDA device over a small model in bfloat16. eagerly: kernel by kernel what has a graph, in
    the graph's shape. forward_tokens: of a launch whose apply and F are a graph, at most."""

    def __init__(self, *, eagerly: bool, forward_tokens: int = 576) -> None:
        from runahead.cuda_graphs.cuda_device import CudaDevice, allocate_mapped_rings
        from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
        from runahead.runtime.models.decoder import Decoder
        from tests.runtime.kernels.poisoned_program import PoisonedProgram

        self.tokens: list[int] = []  # query tokens of each launch
        layout = RingLayout(4, PLAN_WORDS, 1 << 14, ROWS, 4, prompt_tokens=ROWS + MOST_TOKENS)
        rings = allocate_mapped_rings(layout)
        weights = gpu_chain.moved(gpu_chain.random_weights(CONFIG, torch.bfloat16), torch.device("cuda"))
        self.program = PoisonedProgram(
            Decoder(CONFIG, weights, TritonKernelSet()),
            rings,
            max_rows=ROWS,
            max_tokens=ROWS + MOST_TOKENS,
            num_blocks=ROWS * EACH + 1,
            block_size=BLOCK_SIZE,
            context_length=EACH * BLOCK_SIZE,
        )
        self.device = CudaDevice(
            self.program, rings, max_rows=ROWS, mixed_tokens=ROWS + MOST_TOKENS, forward_tokens=forward_tokens
        )
        self.program.poison_blocks(tuple(range(1, ROWS * EACH + 1)))
        self.launches = Launches(self._spoiling(eagerly), rings, CONFIG.vocab_size, EACH)

    def _spoiling(self, eagerly: bool) -> Callable[[LaunchShape], None]:
        device, queries = self.device, self.program.rows.queries
        run = over_device(device)
        launch = device.launch

        def without_graph(shape: LaunchShape) -> None:
            buckets = device.graph_buckets
            whole, rest = buckets.launch_key(shape), buckets.forward_key(shape)
            if whole is not None:
                device.launch_eagerly(whole.shape._replace(number=shape.number))
            elif rest is not None:
                with torch.cuda.stream(device.stream):
                    device._sample(buckets.sample_key(shape).shape)
                    device._after_sampling(rest.shape)
            else:
                launch(shape)

        if eagerly:
            device.launch = without_graph  # type: ignore[method-assign]

        def spoiled(shape: LaunchShape) -> None:
            for left in (queries.token_ids, queries.positions, queries.slot_mapping, queries.seq_lens):
                left.fill_(1 << 30)
            torch.cuda.synchronize()
            self.tokens.append(shape.tokens)
            run(shape)

        return spoiled

    def begin(self) -> None:
        """A row in every slot, with its prompt."""
        for slot in range(ROWS):
            sampling = SamplingParams(temperature=0.0 if slot % 2 else 0.9, seed=slot, logprobs=2 if slot == 4 else -1)
            self.launches.begin(slot, [2 + (7 * i + slot) % 150 for i in range(PROMPTS[slot])], sampling)

    def follow(self, work: tuple[Mapping[int, int], ...]) -> list[tuple[Outcome, torch.Tensor]]:
        """What each launch leaves, and the logits of all row slots after it."""
        self.begin()
        found = []
        self.tokens.clear()
        for each in work:
            outcome = self.launches.launch(each, Form.FULL)
            torch.cuda.synchronize()
            found.append((outcome, self.program._logits[:ROWS].clone()))
        return found


def test_a_captured_mixed_launch_has_the_bits_of_the_same_launch_kernel_by_kernel() -> None:
    stages = [Stage(eagerly=eagerly) for eagerly in (False, True)]
    captured, launched = (stage.follow(WORK) for stage in stages)
    for number, ((ours, our_logits), (theirs, their_logits)) in enumerate(zip(captured, launched, strict=True)):
        assert ours == theirs, number
        assert torch.equal(our_logits, their_logits), number
        assert our_logits.isfinite().all() and all(ours.finite.values()), number
    assert [stage.tokens for stage in stages] == [TOKENS, TOKENS]
    assert captured[-1][1].any(1).all(), "logits of every row were compared"
    counters = stages[0].device.counters
    assert dict(counters.fallbacks) == {"mixed": 2, "closing": 1}, "those of 513 and 557 tokens, and the last"
    assert counters.graph_replays == len(WORK) + 2, "apply and F of two of them are a graph"
    assert stages[1].device.counters.graph_replays == 1, "S of the last"
    for stage in stages:
        stage.device.close()


def test_launches_in_pieces_of_any_size_find_the_memory_that_they_need_where_the_device_holds_it() -> None:
    stage = Stage(eagerly=False, forward_tokens=0)
    stage.device.hold_memory()
    stage.begin()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    for work in ({3: 513}, {1: 577}, {2: 530, 0: 40}, {8: 512, 5: 14, 7: 45}):
        stage.launches.launch(work, Form.FULL)
    assert torch.cuda.memory_stats()["segment.all.allocated"] == before, "nothing was asked of the driver"
    assert dict(stage.device.counters.fallbacks) == {"mixed": 4}
    stage.device.close()


def test_a_row_has_the_logits_that_it_has_alone_in_graphs_of_every_size() -> None:
    """Row 4's own chunks are the same in both, whatever is beside it, and so is where it decodes."""
    alone = tuple({4: each[4]} if 4 in each else {} for each in WORK)
    found = []
    for work in (WORK, alone):
        stage = Stage(eagerly=False)
        found.append([logits[4] for _, logits in stage.follow(work)])
        assert len({tuple(logits.tolist()) for logits in found[-1]}) == 10, "nothing, then its prompt's end and 8 steps"
        stage.device.close()
    assert [number for number, pair in enumerate(zip(*found, strict=True)) if not torch.equal(*pair)] == []


def test_no_call_of_prompts_in_graphs_synchronises_and_none_of_them_is_counted_as_a_fallback() -> None:
    config = gpu_chain.small_config()
    under_test = gpu_chain.cuda_engine(config, gpu_chain.random_weights(config), 2)
    for handle in range(8):
        stopping = StoppingParams(max_tokens=20, ignore_eos=True)
        under_test.submit(handle, [2 + handle] * (30 + 11 * handle), SamplingParams(temperature=0.0), stopping)
    with synchronising_calls_raise():
        under_test.run()
    kinds = under_test.engine.figures.launches_by_kind
    counters = under_test.device.counters
    assert kinds["mixed"] > 8
    assert dict(counters.fallbacks) == {"closing": kinds["closing"]}
    assert counters.graph_replays == sum(kinds.values())
    under_test.device.close()


def test_a_mixed_launch_is_one_graph_of_about_as_many_nodes_in_every_bucket() -> None:
    stage = Stage(eagerly=False)
    device: Any = stage.device
    nodes = {key: device.graphs.nodes(key) for key in device.graph_buckets.every_key() if key.piece is Piece.MIXED}
    print(f"{len(nodes)} graphs of mixed launches, {CONFIG.num_layers} layers: {sorted(set(nodes.values()))} nodes")
    assert min(nodes.values()) > 10
    assert device.counters.graph_captures == len(list(device.graph_buckets.every_key()))
    device.close()


SLEEP_CYCLES = 8_000_000_000  # of the device's clock: about four seconds


def test_no_call_that_enqueues_a_launch_in_pieces_waits_for_the_device() -> None:
    """Long prompts, four launches ahead, behind a device that does nothing for a while. Two launches of this
    model are no more calls than the driver takes. Of a deeper one the second may wait, behind the first."""
    layers = 26
    config = gpu_chain.small_config(num_layers=layers, windows=(0,) * layers)
    under_test = gpu_chain.cuda_engine(config, gpu_chain.random_weights(config), 4)
    device: Any = under_test.device
    device.graph_buckets = replace(device.graph_buckets, mixed_tokens=(1,))  # no launch with a prompt is a graph
    took, asleep = list[float](), torch.cuda.Event(enable_timing=True)
    awake, launch = torch.cuda.Event(enable_timing=True), device.launch

    def timed(shape: LaunchShape) -> None:
        begun = time.perf_counter()
        launch(shape)
        took.append(time.perf_counter() - begun)

    device.launch = timed
    for handle in range(8):
        stopping = StoppingParams(max_tokens=3, ignore_eos=True)
        under_test.submit(handle, [2 + handle] * 200, SamplingParams(temperature=0.0), stopping)
    with torch.cuda.stream(device.stream):
        asleep.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        awake.record()
    under_test.run()
    slept_s = asleep.elapsed_time(awake) / 1e3
    in_pieces, kinds = device.counters.fallbacks["mixed"], under_test.engine.figures.launches_by_kind
    print(f"{in_pieces} launches of at most {device._in_pieces} calls, {sum(took):.2f} s in calls that launch,")
    print(f"the longest {max(took):.3f} s, beside a device that was asleep for {slept_s:.2f} s")
    assert in_pieces == kinds["mixed"] > 8
    assert device._in_pieces * 2 <= device.calls_at_once < device._in_pieces * 4, "four would wait, two need not"
    assert slept_s > 0.5
    assert max(took) < slept_s / 2
    device.close()
