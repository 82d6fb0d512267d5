"""Matrices of a GGUF file that stay packed on a GPU: the numbers of the file, their bytes, and a CPU as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()
pytestmark = pytest.mark.usefixtures("fp8_matrix_units")

from runahead.runtime.checkpoint import open_checkpoint  # noqa: E402
from runahead.runtime.kernels.layer_products import products_of  # noqa: E402
from runahead.runtime.kernels.layers import Linear  # noqa: E402
from runahead.runtime.kernels.quantized_weight import QuantizedWeight  # noqa: E402
from runahead.runtime.kernels.triton.gemm.int4_gemm import in_16_bits  # noqa: E402
from runahead.runtime.models.memory import weight_bytes  # noqa: E402
from runahead.runtime.models.read_config import load_config  # noqa: E402
from runahead.runtime.models.weight_formats import held_bytes, weight_formats  # noqa: E402
from runahead.runtime.models.weights import load_weights  # noqa: E402
from runahead.runtime.process.parts import bytes_to_load, holds_quantized  # noqa: E402
from runahead.runtime.wire.engine_config import EngineConfig  # noqa: E402
from tests.runtime.checkpoint.gguf_files import llama, write  # noqa: E402
from tests.runtime.models.test_int4_on_gpus import loaded_as_on_a_gpu  # noqa: E402

CPU = torch.device("cpu")
STAY = {Kind.Q4_0: "int4", Kind.Q8_0: None, Kind.Q4_1: None, Kind.Q5_0: None}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 1}


def plain_matrices(path: Path) -> list[torch.Tensor]:
    """Matrices that a CPU dequantizes, in bfloat16."""
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, load_config(checkpoint), torch.bfloat16, CPU, lambda weight: weight)
    linears = [linear for layer in weights.layers for linear in products_of(layer)]
    assert not any(linear.quantized for linear in linears)
    return [linear.weight for linear in linears]


@pytest.mark.parametrize(("kind", "held_as"), STAY.items())
def test_blocks_of_32_numbers_stay_packed_where_the_kernels_have_the_type(
    kind: Kind, held_as: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys, which the file has in another order, too."""
    path = write(tmp_path / "model.gguf", llama(**SIZES), kind)
    expected = plain_matrices(path)
    weights = loaded_as_on_a_gpu(path, monkeypatch)
    linears = [linear for layer in weights.layers for linear in products_of(layer)]
    assert len(linears) == len(expected) == 4
    for linear, matrix in zip(linears, expected, strict=True):
        assert getattr(linear.quantized, "kind", None) == held_as
        if isinstance(linear.quantized, QuantizedWeight):
            assert torch.equal(linear.quantized.dequantized(), matrix)
            packed = Linear(linear.weight, None, moved(linear.quantized.panels()))
            assert torch.equal(in_16_bits(packed).weight.cpu(), matrix), "by the kernels"
        else:
            assert torch.equal(linear.weight, matrix)


def moved(weight: QuantizedWeight) -> QuantizedWeight:
    """The matrix on the device of the tests."""
    return QuantizedWeight(
        weight.kind, weight.numbers.to(DEVICE), weight.scales.to(DEVICE), None, weight.group, weight.dtype, True
    )


@pytest.mark.parametrize(("kind", "held_as"), STAY.items())
def test_the_bytes_computed_before_a_file_is_read_are_those_that_a_gpu_takes(
    kind: Kind, held_as: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", llama(**SIZES), kind)
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint)
    computed = held_bytes(checkpoint, config, torch.bfloat16, "cuda")
    said = {one.held_as for one in weight_formats(checkpoint, config, torch.bfloat16, "cuda")}
    assert said == {"bfloat16", *([held_as] if held_as else [])}
    monkeypatch.setattr(QuantizedWeight, "packed", QuantizedWeight.panels)
    assert computed == weight_bytes(loaded_as_on_a_gpu(path, monkeypatch))
    plain = held_bytes(None, config, torch.bfloat16, "cuda")
    assert (computed < plain) == (held_as is not None)
    assert held_bytes(checkpoint, config, torch.bfloat16, "cpu") == plain
    asked = EngineConfig(model=str(path), device="cuda", dtype="bfloat16")
    assert bytes_to_load(asked, checkpoint, config, "cuda") == computed
    assert holds_quantized(asked, checkpoint, config) == (held_as is not None)


def test_one_product_of_matrices_in_different_types_is_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"attn_q": Kind.Q4_0, "attn_k": Kind.Q4_0, "attn_v": Kind.Q8_0, "attn_output": Kind.Q4_0}
    path = write(tmp_path / "model.gguf", llama(**SIZES), kinds)
    (layer,) = loaded_as_on_a_gpu(path, monkeypatch).layers
    assert [getattr(linear.quantized, "kind", None) for linear in products_of(layer)] == [None, "int4", None, None]


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_a_file_of_16_or_32_bits_is_quantized_while_it_is_read(kind: Kind, quantize: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", llama(**SIZES), kind))
    config = load_config(checkpoint)
    weights = load_weights(checkpoint, config, torch.float32, CPU, lambda weight: weight, quantize=quantize)
    linears = [linear for layer in weights.layers for linear in products_of(layer)]
    assert [getattr(linear.quantized, "kind", None) for linear in linears] == [quantize] * 4
    assert held_bytes(checkpoint, config, torch.float32, "cpu", quantize) == weight_bytes(weights)
