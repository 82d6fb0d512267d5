"""For which GPU kernels are chosen: what is asked of it has one answer, and an older one can be put in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

import triton  # noqa: E402

from runahead.cuda_graphs.buckets import buckets_for  # noqa: E402
from runahead.runtime.kernels.layers import Attention, AttentionShape, Dense, Layer, Linear  # noqa: E402
from runahead.runtime.kernels.triton.attention.prefill_tuning import chunk_plan  # noqa: E402
from runahead.runtime.kernels.triton.forward import decode, unfused_products  # noqa: E402
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet  # noqa: E402
from runahead.runtime.kernels.triton.forward.tuning_report import tiling_counts, tilings_asked_for  # noqa: E402
from runahead.runtime.kernels.triton.gemm import tuning  # noqa: E402
from runahead.runtime.kernels.triton.gpu.capability import LEAST_SHARED_MEMORY, Gpu, capability_of, current_gpu  # noqa: E402
from runahead.runtime.kernels.triton.gpu.pdl import dependent_launch_works  # noqa: E402
from runahead.runtime.models.decoder import Decoder  # noqa: E402
from tests.gpu import gpu_chain  # noqa: E402
from tests.runtime.kernels.expert_configs import GLM4_MOE  # noqa: E402
from tests.runtime.kernels.older_gpu import use_as  # noqa: E402
from tests.runtime.kernels.test_triton_decode_streams import HALF, batch_of  # noqa: E402

H200 = Gpu("NVIDIA H200", (9, 0), 227 * 1024, 132)
IN_THE_TABLE = (6144, 4096, 64, "store")  # of the table of an H200
LLAMA_8B = AttentionShape(32, 8, 128, 128**-0.5)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked of the driver is answered as on an H200; no kernel runs."""
    said = {"max_shared_mem": H200.shared_memory, "multiprocessor_count": H200.multiprocessors}
    active = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda device: said))
    with monkeypatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "interpret", False)
        patched.setattr(triton.knobs.runtime, "override_arch", None)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        patched.setattr(torch.cuda, "get_device_name", lambda device: H200.name)
        patched.setattr(torch.cuda, "get_device_capability", lambda device: H200.capability)
        patched.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
        current_gpu.cache_clear()
        yield
    current_gpu.cache_clear()


@pytest.mark.usefixtures("an_h200")
def test_a_gpu_is_what_the_driver_says() -> None:
    assert current_gpu() == H200
    assert dependent_launch_works()
    assert tuning.measured_tiling(*IN_THE_TABLE) is not None
    assert tuning._shared_memory() == H200.shared_memory


@pytest.mark.usefixtures("an_h200")
def test_used_as_an_older_gpu_nothing_is_launched_dependently_nothing_was_measured_and_every_tile_fits() -> None:
    measured = tuning.rows_tiling(*IN_THE_TABLE)
    use_as("8.0")
    assert current_gpu() == Gpu(H200.name, (8, 0), LEAST_SHARED_MEMORY, 132, stands_for_older=True)
    assert triton.knobs.runtime.override_arch == "sm80", "Triton compiles in its form, too"
    assert not dependent_launch_works()
    assert tuning.measured_tiling(*IN_THE_TABLE) is None
    tiling = tuning.rows_tiling(*IN_THE_TABLE)
    assert tiling != measured
    assert (tiling.rows + 64) * tiling.block * 2 * tiling.stages <= LEAST_SHARED_MEMORY


@pytest.mark.usefixtures("an_h200")
def test_a_gpu_that_nobody_has_measured_takes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert tuning.measured_tiling(*IN_THE_TABLE) is None
    assert chunk_plan(LLAMA_8B, torch.bfloat16) is None
    assert dependent_launch_works()


@pytest.mark.usefixtures("an_h200")
def test_a_gpu_that_differs_from_a_measured_one_in_its_memory_alone_takes_what_was_measured_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = tuning.measured_tiling(*IN_THE_TABLE), chunk_plan(LLAMA_8B, torch.bfloat16)
    assert None not in ours
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    current_gpu.cache_clear()
    assert (tuning.measured_tiling(*IN_THE_TABLE), chunk_plan(LLAMA_8B, torch.bfloat16)) == ours
    assert tuning.measured_gpu() == H200.name


def test_its_own_measurements_count_before_those_of_another_and_fewer_multiprocessors_are_another_kind() -> None:
    h100, pcie = (Gpu(name, (9, 0), 227 * 1024, count) for name, count in (("H100", 132), ("H100 PCIe", 114)))
    assert h100.measured_as(["NVIDIA H200", "H100"]) == "H100"
    assert h100.measured_as(["NVIDIA H200"]) == "NVIDIA H200"
    assert pcie.measured_as(["NVIDIA H200", "H100"]) is None
    assert dataclasses.replace(h100, stands_for_older=True).measured_as(["NVIDIA H200", "H100"]) is None


def test_the_switch_names_an_architecture() -> None:
    assert (capability_of("sm80"), capability_of("sm100")) == ((8, 0), (10, 0))
    with pytest.raises(ValueError, match="TRITON_OVERRIDE_ARCH must be a name such as sm80, and is 'hopper'"):
        capability_of("hopper")


def _decoder(dtype: torch.dtype, **sizes: Any) -> Decoder:
    config = dataclasses.replace(gpu_chain.small_config(**{"intermediate_size": 128, **sizes}), dtype=dtype)
    weights = gpu_chain.moved(gpu_chain.random_weights(config, dtype), DEVICE)
    return Decoder(config, weights, TritonKernelSet())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_counted_at_start_is_what_decode_launches_ask_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    decoder, buckets = _decoder(dtype), buckets_for(16)
    asked = _asked_by(monkeypatch, decoder, buckets)
    assert asked == tilings_asked_for(decoder.weights.layers, decoder.weights.lm_head, buckets)
    assert len(asked) == 5 * 4


@pytest.mark.parametrize("shared", [64, 96])
def test_what_is_counted_of_a_model_with_experts_is_what_its_launches_ask_for(
    monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """Whether tiles divide the shared expert's width or not."""
    routed = dataclasses.replace(GLM4_MOE["routed"], shared_size=shared)
    decoder, buckets = _decoder(HALF, **{**GLM4_MOE, "routed": routed}), (1, 2, 72)
    asked = _asked_by(monkeypatch, decoder, buckets)
    assert asked == tilings_asked_for(decoder.weights.layers, decoder.weights.lm_head, buckets)
    assert len(asked) == 12


def _asked_by(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, buckets: Sequence[int]
) -> set[tuple[int, int, int, str]]:
    """Which tilings decode launches of so many rows ask for."""
    asked, rows_tiling = set(), tuning.rows_tiling

    def noted(outputs: int, depth: int, columns: int, epilogue: str, itemsize: int) -> Any:
        assert itemsize == decoder.dtype.itemsize
        asked.add((outputs, depth, columns, epilogue))
        return rows_tiling(outputs, depth, columns, epilogue, itemsize)

    for module in (decode, unfused_products):
        monkeypatch.setattr(module, "rows_tiling", noted)
    for rows in buckets:
        cache = decoder.make_cache(1 + 6 * rows, 8)
        hidden = decoder.forward(batch_of([5] * rows, 1, DEVICE), cache)
        logits = torch.empty((rows, decoder.config.vocab_size), dtype=torch.float32, device=DEVICE)
        places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        decoder.kernels.logits_into(hidden, decoder.weights.lm_head, logits, places)
    return asked


@pytest.mark.usefixtures("an_h200")
def test_the_counts_say_what_the_table_has_and_lacks_and_for_which_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, other = (
        Linear(torch.empty((outputs, 4096), device="meta", dtype=torch.bfloat16), None) for outputs in (6144, 192)
    )
    shape = AttentionShape(32, 8, 128, 1.0)
    layer = Layer(
        Attention(shape, 0, None, linear, None, None, other),
        Dense(None, gate_up=other, down=other),
    )
    head = torch.empty((192, 4096), device="meta", dtype=torch.bfloat16)
    counts = tiling_counts((layer, layer), head, (1, 2, 64))
    said = {"gpu": H200.name, "compute_capability": "9.0", "measured_on": H200.name}
    assert counts == {**said, "measured": 2, "default": 6}
    assert tiling_counts((layer, layer), head.float(), (1, 2, 64)) == {**said, "measured": 0, "default": 8}
    use_as("8.0")
    assert tiling_counts((layer, layer), head, (1, 2, 64)) == {
        "gpu": H200.name,
        "compute_capability": "8.0",
        "measured_on": "none",
        "measured": 0,
        "default": 8,
    }
