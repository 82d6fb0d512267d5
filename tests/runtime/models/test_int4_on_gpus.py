"""INT4 checkpoints as a GPU holds them: which matrices stay INT4, their numbers, and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.checkpoint import StoredTensor, open_checkpoint
from runahead.runtime.kernels.layer_products import kinds_that_stay
from runahead.runtime.kernels.layers import Attention, Dense
from runahead.runtime.kernels.quantized_weight import Fp8Weight, Kind, QuantizedWeight, stays_quantized
from runahead.runtime.models import weights as module
from runahead.runtime.models.architecture import ModelWeights, TensorStack
from runahead.runtime.models.memory import weight_bytes
from runahead.runtime.models.quantized_linears import Held, held_quantized
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weight_formats import held_bytes, some_stay_quantized, weight_formats
from runahead.runtime.models.weights import described, load_weights
from tests.runtime.checkpoint.quantize import quantize
from tests.runtime.checkpoint.quantized_reader import dequantize_folder
from tests.runtime.models.shortened_model import write_shortened_model

FORMATS = (
    "int4-packed", "int4-packed-zeros", "int4-packed-ordered", "gptq-int4", "gptq-int4-ordered", "gptq-v2-int4",
    "awq-int4",
)  # fmt: skip
WIDE = ("int4-packed-zeros", "gptq-int4-ordered")  # in every run with wide groups too


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the bundled model."""
    return write_shortened_model(tmp_path_factory.mktemp("models") / "plain", layers=2)


def loaded_as_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWeights:
    """The tensors of a GPU, in the memory of a CPU."""

    def held(
        stack: TensorStack, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: str,
        kinds: Collection[Kind], quantize: str = "none",
    ) -> Held | None:  # fmt: skip
        return held_quantized(stack, stored, dtype, "cuda", kinds, quantize)

    monkeypatch.setattr(module, "held_quantized", held)
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint)
    return load_weights(checkpoint, config, torch.bfloat16, torch.device("cpu"), lambda weight: weight)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *((name, 32) for name in FORMATS),
        *((name, 128) for name in WIDE),
        *(pytest.param(name, 128, marks=pytest.mark.large) for name in FORMATS if name not in WIDE),
    ],
)
def test_matrices_of_every_format_stay_int4_with_the_numbers_of_the_definition(
    name: str, group: int, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for projections of one matrix whose columns have different orders of activations."""
    quantize(plain, tmp_path, name, group)
    weights, expected = loaded_as_on_a_gpu(tmp_path, monkeypatch), dequantize_folder(tmp_path)
    for number, layer in enumerate(weights.layers):
        assert isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, Dense)
        prefix = f"model.layers.{number}."
        for linear, names in (
            (layer.mixer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.mixer.o, ("self_attn.o_proj",)),
            (layer.feed_forward.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.feed_forward.down, ("mlp.down_proj",)),
        ):
            assert (linear.quantized is not None) == ("ordered" not in name or len(names) == 1)
            parts = torch.cat([expected[f"{prefix}{name}.weight"] for name in names]).bfloat16()
            assert not isinstance(linear.quantized, Fp8Weight)
            found = linear.weight if linear.quantized is None else linear.quantized.dequantized()
            assert torch.equal(found, parts), names


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_computed_before_the_weights_are_read_are_the_bytes_that_a_gpu_takes(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(plain, tmp_path, name, 64)
    checkpoint = open_checkpoint(tmp_path)
    config = load_config(checkpoint)
    computed = held_bytes(checkpoint, config, torch.bfloat16, "cuda")
    monkeypatch.setattr(QuantizedWeight, "packed", QuantizedWeight.panels)
    assert computed == weight_bytes(loaded_as_on_a_gpu(tmp_path, monkeypatch))
    assert computed < held_bytes(open_checkpoint(plain), config, torch.bfloat16, "cuda")
    assert some_stay_quantized(checkpoint, config, torch.bfloat16, "cuda", "none")
    assert "int4" in {one.held_as for one in weight_formats(checkpoint, config, torch.bfloat16, "cuda")}


def test_int4_made_at_load_takes_a_third_of_the_memory_of_16_bits_in_a_dense_model() -> None:
    config = SHAPES["8B"].described()
    plain, made = (held_bytes(None, config, torch.bfloat16, "cuda", quantize) for quantize in ("none", "int4"))
    layers = 32 * ((32 + 2 * 8) * 128 * 4096 + 4096 * 4096 + 3 * 4096 * 14336)
    assert made == plain - 2 * layers + layers // 2 + 4 * layers // 128


@pytest.mark.parametrize(
    ("change", "stay"),
    [
        ({}, True), ({"group": 32}, True), ({"group": 64}, True), ({"group": 256}, True), ({"group": 384}, True),
        ({"scales": torch.float16}, True), ({"group": 16}, False), ({"group": 96}, False),
        ({"scales": torch.float32}, False), ({"dtype": torch.float16}, False), ({"shape": (72, 384)}, False),
        ({"shape": (80, 320)}, False), ({"kind": "int8"}, False),
    ],
)  # fmt: skip
def test_a_gpu_holds_int4_of_shapes_groups_and_dtypes_that_its_kernels_take(change: dict[str, Any], stay: bool) -> None:
    form: dict[str, Any] = {
        "kind": "int4", "shape": (80, 384), "group": 128, "scales": torch.bfloat16, "dtype": torch.bfloat16,
        "device": "cuda",
    }  # fmt: skip
    assert stays_quantized(**(form | change)) == stay


@pytest.mark.parametrize(("name", "stay"), [("8B", True), ("8B-hybrid", False), ("30B-A3B", False)])
def test_models_with_experts_or_recurrent_layers_are_dequantized_from_int4(name: str, stay: bool) -> None:
    layers = described(SHAPES[name].described()).layers
    assert ("int4" in kinds_that_stay(layers, "cuda")) == stay
    assert "fp8" in kinds_that_stay(layers, "cuda") and "int4" in kinds_that_stay(layers, "cpu")
