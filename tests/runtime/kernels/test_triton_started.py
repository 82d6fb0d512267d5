"""A start for CUDA as the service makes it, with Triton's interpreter in the place of the GPU: drafts and masks find in
rings, buffers and scheduler what they need, and the mask worker is a process of its own; so does a head over recurrent
states."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU the tests of tests/gpu make a start for real"),
]

from runahead.cuda_graphs.cuda_device import Taken  # noqa: E402
from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.host_device import HostDevice  # noqa: E402
from runahead.cuda_graphs.rings import RingMemory, allocate_rings  # noqa: E402
from runahead.runtime import models  # noqa: E402
from runahead.runtime.engine.loop import Engine  # noqa: E402
from runahead.runtime.models.load import load_model  # noqa: E402
from runahead.runtime.process import cuda  # noqa: E402
from runahead.runtime.process.assemble import assemble  # noqa: E402
from runahead.runtime.wire.engine_config import DeviceName, EngineConfig  # noqa: E402
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams  # noqa: E402
from tests.gpu.gpu_chain import EngineUnderTest  # noqa: E402
from tests.runtime.chain import MemoryLinks  # noqa: E402
from tests.runtime.kernels import headed_engine  # noqa: E402
from tests.structures.structured_engine import grammar_of  # noqa: E402

BUNDLED: Final = Path(models.__path__[0]) / "bundled"
FREE: Final = 1 << 33
SCHEMA: Final = {"enum": ["read_lines", "write_lines"]}


class InterpretedDevice(HostDevice):
    """A `CudaDevice` for the start. A launch that no graph would have been captured for is an error."""

    taken = Taken(0, 0)
    buckets, mixed_buckets = (4,), (64,)

    def __init__(
        self, program: Any, rings: RingMemory, *, draft_forms: tuple[int, ...], draft_rows: int, masked: bool, **_: Any
    ) -> None:
        super().__init__(program, rings)
        self._captured: Callable[[LaunchShape], bool] = lambda shape: (
            {shape.drafts, shape.sample_drafts} <= {0, *draft_forms}
            and (not shape.drafts or shape.rows <= draft_rows)
            and (masked or not shape.masked)
        )

    def hold_memory(self) -> None:
        """A host has nothing to hold."""

    def launch(self, shape: LaunchShape) -> None:
        assert self._captured(shape), shape
        super().launch(shape)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, empty_cache=lambda: None)
    for name, found in vars(gpu).items():
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE, 2 * FREE))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def load(checkpoint: Any, device: Any, dtype: Any, load_format: str, kernels: Any, *rest: Any) -> Any:
        return load_model(checkpoint, DEVICE, torch.float32, load_format, kernels, *rest)

    monkeypatch.setattr(cuda, "load_model", load)
    monkeypatch.setattr(cuda, "allocate_mapped_rings", allocate_rings)
    monkeypatch.setattr(cuda, "keep_kernels", lambda folder, called: None)
    monkeypatch.setattr(cuda, "CudaDevice", InterpretedDevice)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's first layer. Most time goes into layers, and what it says is of no interest."""
    folder = tmp_path_factory.mktemp("shallow")
    for file in BUNDLED.iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / file.name).symlink_to(file)
    stored = load_file(BUNDLED / "model.safetensors")
    layer = re.compile(r"layers\.[1-9]")
    save_file({name: weight for name, weight in stored.items() if not layer.search(name)}, folder / "model.safetensors")
    config = {**json.loads((BUNDLED / "config.json").read_text("utf-8")), "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def served(folder: Path, drafter: Any, run_ahead: int) -> tuple[dict[int, list[int]], list[int], int]:
    """Tokens of a structured request and of a plain one that repeats itself, the drafts of each place that were right,
    and what the structured one ended with."""
    config = EngineConfig(
        model=str(folder), device="cuda", max_rows=2, context_length=64, prefill_chunk=16, max_prefill_tokens=16,
        num_blocks=20, drafter=drafter, run_ahead=run_ahead,
    )  # fmt: skip
    parts, links = assemble(config, lambda *_: None), MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=10, masks=parts.masks, run_ahead_asked=run_ahead)
    under_test = EngineUnderTest(engine, parts.device, None, links)
    greedy = SamplingParams(temperature=0.0)
    under_test.submit(1, [5, 6, 7, 8], greedy, StoppingParams(max_tokens=20), structure=grammar_of(SCHEMA))
    under_test.submit(2, [15, 16, 17, 15, 16, 17], greedy, StoppingParams(max_tokens=6, ignore_eos=True))
    with torch.inference_mode():
        under_test.run()
        engine.drain("test")
    parts.device.close()
    parts.masks.stop()
    return under_test.tokens(), list(engine.stats().accepted.values()), under_test.reasons()[1]


@pytest.mark.usefixtures("interpreted")
def test_a_start_for_cuda_drafts_and_follows_structures(shallow: Path) -> None:
    _, right, ended = served(shallow, "ngram", 2)
    assert ended == FinishReason.END_OF_SEQUENCE
    assert sum(right) > 0, "no draft was right"


@pytest.mark.large
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("drafter", "run_ahead"), [("none", 2), ("ngram", 0), ("ngram", 4)])
def test_no_token_hangs_on_the_drafter_or_the_depth(shallow: Path, drafter: str, run_ahead: int) -> None:
    expected, forced, _ = served(shallow, "none", 0)
    assert sum(forced) > 0, "nothing that was forced was kept"
    found, right, ended = served(shallow, drafter, run_ahead)
    assert (found, ended) == (expected, FinishReason.END_OF_SEQUENCE)
    assert (sum(right) > sum(forced)) == (drafter == "ngram"), "what is forced, and what the drafter has guessed"


def by_a_head_over_states(folder: Path, device: DeviceName, run_ahead: int) -> tuple[object, ...]:
    """What two requests say, and one that goes on from the first behind a snapshot; drafts looked at and right, cached
    tokens, snapshots that were found."""
    config = EngineConfig(
        model=str(folder), device=device, dtype="float32", max_rows=2, context_length=headed_engine.CONTEXT,
        prefill_chunk=32, max_prefill_tokens=64, num_blocks=20, drafter="mtp", draft_tokens=3, run_ahead=run_ahead,
        state_snapshot_blocks=1,
    )  # fmt: skip
    parts, links = assemble(config, lambda *_: None), MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=10, run_ahead_asked=run_ahead)
    under_test = EngineUnderTest(engine, parts.device, None, links)
    stopping = StoppingParams(max_tokens=8, ignore_eos=True)
    with torch.inference_mode():
        for handle, prompt in enumerate(([5, 6, 7, 8] * 3, [15, 16, 17])):
            under_test.submit(handle, prompt, SamplingParams(temperature=0.5 * handle, seed=1), stopping)
        under_test.run()
        longer = [5, 6, 7, 8] * 3 + under_test.tokens()[0]
        under_test.submit(2, longer, SamplingParams(temperature=0.0), stopping)
        under_test.run()
        engine.drain("test")
    parts.device.close()
    stats = engine.stats()
    return under_test.tokens(), stats.drafted, stats.accepted, stats.cached_tokens, stats.snapshots_found


@pytest.mark.large
@pytest.mark.usefixtures("interpreted")
def test_a_start_for_cuda_drafts_with_the_head_of_a_model_with_states_as_on_a_cpu(tmp_path: Path) -> None:
    headed_engine.write_pair(tmp_path, headed_engine.OVER_STATES)
    expected = by_a_head_over_states(tmp_path / "target", "cpu", 2)
    assert expected[-2:] == (16, 1), "nobody began with a snapshot"
    assert by_a_head_over_states(tmp_path / "target", "cuda", 2) == expected
