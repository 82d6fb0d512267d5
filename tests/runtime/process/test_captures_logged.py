"""While graphs are captured, which may take longer than to load the weights, a start on a GPU says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runahead.cuda_graphs.cuda_device import Taken
from runahead.cuda_graphs.rings import allocate_rings
from runahead.runtime import models
from runahead.runtime.checkpoint import Checkpoint
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.load import load_model
from runahead.runtime.process import cuda
from runahead.runtime.process.assemble import assemble
from runahead.runtime.process.device_choice import LEAST_CAPABILITY, check_gpu
from runahead.runtime.process.rank_start import StartedRanks
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

BUNDLED = Path(models.__path__[0]) / "bundled"
GRAPHS = 10
FREE_BYTES = 1 << 32  # after the weights
GRAPH_BYTES = 1 << 20  # between one look at the memory and the next


class CapturingDevice:
    """Says what a device says while it captures its graphs, and captures none."""

    taken = Taken(launches=0, graphs=GRAPH_BYTES)

    def __init__(
        self, program: object, rings: object, *, progress: Callable[[int, int], None], is_trial: bool, **rest: Any
    ) -> None:
        for done in range(1, GRAPHS + 1):
            torch.cuda.empty_cache()  # as a capture does before it begins
            progress(done, GRAPHS)

    def hold_memory(self) -> None:
        pass

    def close(self) -> None:
        pass


class LateDevice(CapturingDevice):
    """Says that it begins, before its first capture."""

    def __init__(self, *parts: object, progress: Callable[[int, int], None], **rest: Any) -> None:
        progress(0, GRAPHS)
        super().__init__(*parts, progress=progress, **rest)


@pytest.fixture
def a_gpu_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a GPU whose model and rings are on the CPU."""

    def load_on_the_cpu(
        checkpoint: Checkpoint, _: Any, dtype: Any, load_format: str, kernels: Any, *rest: Any
    ) -> object:
        return load_model(checkpoint, torch.device("cpu"), torch.float32, load_format, ReferenceKernels(), *rest)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    looks = count()
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device=None: (FREE_BYTES - next(looks) * GRAPH_BYTES, 4 * FREE_BYTES)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: LEAST_CAPABILITY)
    monkeypatch.setattr(cuda, "load_model", load_on_the_cpu)
    monkeypatch.setattr(cuda, "allocate_mapped_rings", allocate_rings)
    monkeypatch.setattr(cuda, "keep_kernels", lambda folder, called: None)
    monkeypatch.setattr(cuda, "TritonProgram", lambda *parts, **sizes: SimpleNamespace())
    monkeypatch.setattr(cuda, "CudaDevice", CapturingDevice)


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_each_quarter_of_the_graphs_is_logged_and_none_of_it_as_bytes_loaded() -> None:
    loaded: list[tuple[int, int]] = []
    with capture_logs() as events:
        assemble(
            EngineConfig(model=str(BUNDLED), device="cuda", max_rows=4, context_length=256),
            lambda done, total: loaded.append((done, total)),
        )
    captures = [event for event in events if event["event"] == "capturing"]
    assert [event["bytes"] for event in captures] == [look * GRAPH_BYTES for look in range(1, 6)]
    assert all(event["seconds"] >= 0.0 for event in captures)
    said = [(event["graphs"], event["of_graphs"]) for event in captures]
    assert said == [(1, GRAPHS), (3, GRAPHS), (5, GRAPHS), (8, GRAPHS), (GRAPHS, GRAPHS)]
    assert loaded[-1][0] == loaded[-1][1] > GRAPHS
    assert all(total == loaded[-1][1] for _, total in loaded)


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_what_the_allocator_keeps_for_later_is_no_memory_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [FREE_BYTES // 2]  # by the allocator, after what warmed up
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE_BYTES - kept[-1], 4 * FREE_BYTES))
    monkeypatch.setattr(cuda, "CudaDevice", LateDevice)
    with capture_logs() as events:
        assemble(EngineConfig(model=str(BUNDLED), device="cuda", max_rows=4, context_length=256), lambda *_: None)
    assert {event["bytes"] for event in events if event["event"] == "capturing"} == {0}


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_what_memory_is_taken_for_is_logged_before_the_first_graph_is_captured() -> None:
    with capture_logs() as events:
        parts = assemble(
            EngineConfig(model=str(BUNDLED), device="cuda", max_rows=4, context_length=256), lambda *_: None
        )
    (memory,) = [event for event in events if event["event"] == "memory"]
    assert [event["event"] for event in events].index("memory") < [event["event"] for event in events].index(
        "capturing"
    )
    assert memory["kv_bytes"] % parts.info.num_blocks == 0
    assert 0 < memory["kv_bytes"] < FREE_BYTES
    assert memory["weight_bytes"] >= 4 * parts.info.parameters
    assert memory["state_bytes"] == 0


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize(
    ("free", "sentence"),
    [
        (1 << 20, r"the weights take 9 MiB in bfloat16, and the GPU has 1 MiB free: serve a smaller model"),
        (10 << 20, r"memory holds \d+ KV blocks; one request of 2048 tokens needs 129"),
    ],
)
def test_a_gpu_that_is_too_small_is_refused_before_the_weights_are_read(
    free: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 4 * FREE_BYTES))
    monkeypatch.setattr(cuda, "load_model", lambda *parts: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=sentence):
        assemble(EngineConfig(model=str(BUNDLED), device="cuda", dtype="bfloat16"), lambda *_: None)


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
@pytest.mark.parametrize("attempt", ["made", "held"])
def test_gpus_stop_waiting_for_each_other_before_a_device_that_lacks_memory_is_freed(
    attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that waits for another rank would keep the GPU from freeing memory, and so the start from failing."""
    done: list[str] = []

    class TooLarge(CapturingDevice):
        def __init__(self, *parts: object, is_trial: bool, **rest: Any) -> None:
            if attempt == "made" and not is_trial:
                raise torch.OutOfMemoryError("no memory")
            super().__init__(*parts, is_trial=is_trial, **rest)
            self._is_trial = is_trial

        def hold_memory(self) -> None:
            raise torch.OutOfMemoryError("no memory")

        def close(self) -> None:
            done.extend([] if self._is_trial else ["close"])

    class Ranks(StartedRanks):
        def stop(self) -> None:
            done.append("stop")

        def close(self) -> None:
            done.append("end")

    monkeypatch.setattr(cuda, "CudaDevice", TooLarge)
    monkeypatch.setattr(cuda, "start_ranks", lambda *_: Ranks())
    with pytest.raises(ConfigError, match="memory ran out"):
        assemble(
            EngineConfig(model=str(BUNDLED), device="cuda", max_rows=4, context_length=256, num_blocks=64),
            lambda *_: None,
        )
    assert done == (["stop", "end"] if attempt == "made" else ["stop", "close", "stop", "end"])


def test_a_gpu_that_is_too_old_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 or more .*; Tesla T4 has 7\.5; --device cpu"):
        check_gpu("Tesla T4", (7, 5))
    check_gpu("NVIDIA A100", (8, 0))
    check_gpu("NVIDIA B200", (10, 0))


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_how_many_products_were_measured_on_this_gpu_is_logged_once() -> None:
    with capture_logs() as events:
        assemble(EngineConfig(model=str(BUNDLED), device="cuda", max_rows=4, context_length=256), lambda *_: None)
    (tilings,) = [event for event in events if event["event"] == "tilings"]
    assert tilings["measured"] == 0 and tilings["default"] > 0


@pytest.mark.usefixtures("a_gpu_on_the_cpu")
def test_the_kernel_cache_is_set_up_before_the_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(cuda, "keep_kernels", lambda folder, called: done.append((folder, called)))
    monkeypatch.setattr(cuda, "gpu_kernels", lambda *asked: done.append("kernels"))
    config = EngineConfig(
        model=str(BUNDLED),
        device="cuda",
        max_rows=4,
        context_length=256,
        kernel_cache="/kernels",
        spelled={"kernel_cache": "RUNAHEAD__KERNEL_CACHE"},
    )
    assemble(config, lambda *_: None)
    assert done == [("/kernels", "RUNAHEAD__KERNEL_CACHE"), "kernels"]
