"""Where the CUDA device looks up while it enqueues a launch that is no graph: after apply, each layer, and F's end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs import cuda_device, marks  # noqa: E402
from runahead.cuda_graphs.buckets import Buckets, GraphKey  # noqa: E402
from runahead.cuda_graphs.cuda_device import CudaDevice  # noqa: E402
from runahead.cuda_graphs.device import DeviceCounters, Form, LaunchShape  # noqa: E402
from runahead.cuda_graphs.enqueue_watch import unwatched  # noqa: E402
from runahead.cuda_graphs.rings import RingLayout, allocate_rings  # noqa: E402
from runahead.cuda_graphs.tail import TAIL_MS, TailPlacement  # noqa: E402
from runahead.runtime.kernels.forward_batch import ForwardBatch  # noqa: E402
from runahead.runtime.kernels.kernel_set import KernelSet  # noqa: E402
from runahead.runtime.kernels.reference.forward import ReferenceKernels  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402

STALE_NS, IDLE_NS = 77, 1234


class Steps(list[str]):
    """What the device did, in order; it stands for the program, the graphs and the watch of a device."""

    idle_ns = IDLE_NS

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[LaunchShape] = []
        self.ran: list[LaunchShape] = []

    def replay(self, key: GraphKey) -> None:
        self.append(f"replay {key.piece}")

    def begin(self) -> None:
        self.append("begin")

    def first_piece(self) -> None:
        self.append("first")

    def piece(self) -> None:
        self.append("look")

    def apply(self, shape: LaunchShape) -> int:
        self.append("apply")
        self.applied.append(shape)
        return 0

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        for _ in range(2):
            self.append("layer")
            between()
        self.ran.append(shape)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, Steps]:
    """A device without CUDA: what it enqueues is written down."""
    steps, device = Steps(), CudaDevice.__new__(CudaDevice)
    device.rings = allocate_rings(RingLayout(4, 64, 64, 4, 1))
    device.rings.idle_ns[:] = STALE_NS
    device.counters, device.graph_buckets = DeviceCounters(), Buckets((1, 4), (4,), (8, 16), (8, 16, 24))
    device._program = device.graphs = device._watch = steps  # type: ignore[assignment]
    device._counter = device._marks_on_device = device._end_ns = torch.zeros(1)
    device._tail = TailPlacement(layers=2, least_ms=2 * TAIL_MS)
    monkeypatch.setattr(marks, "tail", lambda *_: steps.append("tail"))
    monkeypatch.setattr(marks, "ended", lambda *_: steps.append("ended"))
    assert vars(cuda_device)["marks"] is marks
    return device, steps


def test_a_mixed_launch_of_few_query_tokens_is_one_graph(parts: tuple[CudaDevice, Steps]) -> None:
    device, steps = parts
    device._enqueue(LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=16, is_decode=False))
    assert steps == ["replay mixed"]
    assert device.counters.graph_replays == 1 and not device.counters.fallbacks
    assert device.rings.idle_ns[1] == 0


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=17, is_decode=False), "mixed"),
        (LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=16, is_decode=False, prompt_logprobs=True), "prompt_logprobs"),
        (LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=2, is_decode=True, prompt_logprobs=True), "prompt_logprobs"),
        (LaunchShape(5, 2, Form.PLAIN, rows=0, tokens=0, is_decode=False), "closing"),
    ],
)
def test_what_is_no_graph_is_counted_by_its_reason(
    parts: tuple[CudaDevice, Steps], shape: LaunchShape, reason: str
) -> None:
    device, steps = parts
    device._enqueue(shape)
    assert steps[1] == "replay sample"
    assert dict(device.counters.fallbacks) == {reason: 1}


def test_a_larger_mixed_launch_is_watched_after_each_of_its_pieces(parts: tuple[CudaDevice, Steps]) -> None:
    device, steps = parts
    device._enqueue(LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=20, is_decode=False))
    assert steps == [
        "begin", "replay sample", "first", "apply", "look", "layer", "tail", "look", "layer", "look", "ended",
        "look",
    ]  # fmt: skip
    assert device.rings.idle_ns.tolist() == [STALE_NS, IDLE_NS, STALE_NS, STALE_NS]


def test_apply_and_f_of_a_mixed_launch_that_is_not_much_larger_are_a_graph_behind_that_of_s(
    parts: tuple[CudaDevice, Steps],
) -> None:
    device, steps = parts
    device.graph_buckets = Buckets((1, 4), (4,), (8, 16), (8, 16, 24), forward_rows=(1, 4), forward_tokens=(20,))
    device._enqueue(LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=20, is_decode=False))
    assert steps == ["begin", "replay sample", "first", "replay forward", "look"]
    assert device.counters.graph_replays == 2 and dict(device.counters.fallbacks) == {"mixed": 1}
    device._enqueue(LaunchShape(6, 2, Form.PLAIN, rows=2, tokens=21, is_decode=False))
    assert steps[5:8] == ["begin", "replay sample", "first"] and steps[8] == "apply"


def test_apply_and_f_of_a_launch_in_pieces_have_the_next_sizes_that_have_warmed_up(
    parts: tuple[CudaDevice, Steps],
) -> None:
    device, steps = parts
    device._enqueue(LaunchShape(5, 2, Form.PLAIN, rows=2, tokens=17, is_decode=False))
    device._enqueue(LaunchShape(6, 2, Form.PLAIN, rows=2, tokens=2, is_decode=True, prompt_logprobs=True))
    assert steps.applied == steps.ran == [
        LaunchShape(5, 2, Form.PLAIN, rows=4, tokens=24, is_decode=False),
        LaunchShape(6, 2, Form.PLAIN, rows=4, tokens=4, is_decode=True, prompt_logprobs=True),
    ]  # fmt: skip


def test_a_closing_launch_is_watched_too(parts: tuple[CudaDevice, Steps]) -> None:
    device, steps = parts
    device._enqueue(LaunchShape(6, 2, Form.PLAIN, rows=0, tokens=0, is_decode=False))
    assert steps == ["begin", "replay sample", "first", "tail", "apply", "look", "ended", "look"]
    assert device.rings.idle_ns[2] == IDLE_NS


def test_a_launch_that_is_one_graph_is_not_watched_and_has_no_idle_time_inside(
    parts: tuple[CudaDevice, Steps],
) -> None:
    device, steps = parts
    device._enqueue(LaunchShape(7, 2, Form.PLAIN, rows=2, tokens=2, is_decode=True))
    assert steps == ["replay launch"]
    assert device.rings.idle_ns.tolist() == [STALE_NS, STALE_NS, STALE_NS, 0], "not what an earlier launch left"


def test_nothing_is_looked_at_while_a_graph_is_captured(parts: tuple[CudaDevice, Steps]) -> None:
    device, steps = parts
    device._after_sampling(LaunchShape(8, 2, Form.PLAIN, rows=2, tokens=2, is_decode=True))
    assert steps == ["apply", "layer", "tail", "layer", "ended"]


@pytest.mark.parametrize("kernels", [ReferenceKernels(), TritonKernelSet()], ids=["reference", "triton"])
def test_a_forward_says_when_each_layer_is_enqueued_and_a_brief_one_runs_one_of_those_that_are_alike(
    kernels: KernelSet,
) -> None:
    config = gpu_chain.small_config()
    device = DEVICE if isinstance(kernels, TritonKernelSet) else torch.device("cpu")
    decoder = Decoder(config, gpu_chain.moved(gpu_chain.random_weights(config), device), kernels)
    cache = decoder.make_cache(2, 16)

    def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = ForwardBatch(
        token_ids=ints(3, 4),
        positions=ints(0, 1),
        slot_mapping=ints(16, 17),
        query_start_loc=ints(0, 2, dtype=torch.int32),
        seq_lens=ints(2, dtype=torch.int32),
        block_tables=ints(1, dtype=torch.int32)[None],
        num_tokens=2,
        num_rows=1,
        max_seq_len=2,
        is_decode=False,
    )
    written: list[list[bool]] = []
    with torch.inference_mode():
        decoder.forward(batch, cache, lambda: written.append([bool(keys[1].any()) for keys in cache.keys]))
    assert written == [[True, False], [True, True]], "after each layer, and before the next"
    written.clear()
    for keys in cache.keys:
        keys.zero_()
    with torch.inference_mode():
        decoder.forward(
            batch, cache, lambda: written.append([bool(keys[1].any()) for keys in cache.keys]), briefly=True
        )
    assert written == [[True, False]]
