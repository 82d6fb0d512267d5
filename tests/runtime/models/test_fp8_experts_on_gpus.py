"""Experts of FP8 checkpoints as a GPU holds them: their numbers, ranks' parts of them, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.checkpoint import StoredTensor, open_checkpoint
from runahead.runtime.kernels.layers import Experts, Linear
from runahead.runtime.kernels.quantized_weight import ExpertFp8, Kind
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.models import weights as module
from runahead.runtime.models.architecture import TensorStack
from runahead.runtime.models.quantized_linears import Held, held_quantized
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weight_formats import held_bytes, weight_formats
from runahead.runtime.models.weights import described_stacks, dummy_weights, load_weights
from tests.runtime.checkpoint.quantize import quantize
from tests.runtime.checkpoint.quantized_reader import dequantize_folder
from tests.runtime.models.checkpoints import QWEN3_MOE, QWEN3_NEXT, Case, save
from tests.runtime.models.test_stacked_experts import stack

CPU: Final = torch.device("cpu")
COUNT: Final = 4
HIDDEN: Final = 256
FORMATS: Final = ("fp8-blocks", "fp8-blocks-compressed", "fp8-per-channel", "fp8-per-tensor")
SIZES: Final[Mapping[str, Any]] = {"hidden_size": HIDDEN, "num_experts": COUNT, "num_experts_per_tok": 2}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are held as on a GPU, in the memory of a CPU."""

    def held(
        stack: TensorStack, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: str,
        kinds: Collection[Kind], quantize: str = "none",
    ) -> Held | None:  # fmt: skip
        return held_quantized(stack, stored, dtype, "cuda", kinds, quantize)

    monkeypatch.setattr(module, "held_quantized", held)


def folder_of(name: str, tmp_path: Path, width: int) -> Path:
    """A checkpoint with experts of this width, in the format `name`, with blocks of 128 or of what divides the
    width."""
    sizes = {**QWEN3_MOE, **SIZES, "moe_intermediate_size": width}
    save(Case("experts", Qwen3MoeConfig, sizes), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / name, name, math.gcd(128, width))
    return tmp_path / name


def experts_of(folder: Path, shard: Shard = WHOLE, quantize: str = "none", layer: int = -1) -> Experts:
    checkpoint = open_checkpoint(folder)
    config = load_config(checkpoint)
    weights = load_weights(checkpoint, config, torch.bfloat16, CPU, torch.Tensor.contiguous, None, shard, quantize)
    found = weights.layers[layer].feed_forward
    assert isinstance(found, Experts)
    return found


def numbers_of(linears: tuple[Linear, ...]) -> list[torch.Tensor]:
    quantized = [linear.quantized for linear in linears]
    assert all(isinstance(one, ExpertFp8) for one in quantized) or not any(quantized)
    return [
        one.dequantized() if isinstance(one, ExpertFp8) else linear.weight
        for one, linear in zip(quantized, linears, strict=True)
    ]


def stay(linears: tuple[Linear, ...]) -> bool:
    return all(isinstance(linear.quantized, ExpertFp8) for linear in linears)


def check_numbers(experts: Experts, expected: Mapping[str, torch.Tensor], begins: str) -> None:
    first, last = numbers_of(experts.gate_up), numbers_of(experts.down)
    assert len(first) == len(last) == COUNT
    for number in range(COUNT):
        parts = [expected[f"{begins}{number}.{name}_proj.weight"].bfloat16() for name in ("gate", "up", "down")]
        assert torch.equal(first[number], torch.cat(parts[:2])) and torch.equal(last[number], parts[2])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "width"), [*((name, 128) for name in FORMATS), ("fp8-blocks", 192), ("fp8-per-channel", 80)]
)
def test_experts_of_every_format_stay_fp8_with_the_numbers_of_the_definition(
    name: str, width: int, tmp_path: Path
) -> None:
    """But for depths that are no multiples of 128."""
    folder = folder_of(name, tmp_path, width)
    layers, experts = load_config(open_checkpoint(folder)).num_layers, experts_of(folder)
    assert stay(experts.gate_up) and stay(experts.down) == (width == 128)
    check_numbers(experts, dequantize_folder(folder), f"model.layers.{layers - 1}.mlp.experts.")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("width", [256, 192])
@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-per-channel", "fp8-per-tensor"])
def test_ranks_have_the_whole_experts_numbers_between_them(name: str, width: int, tmp_path: Path) -> None:
    """With 96 of the width for each of two ranks, blocks of rows are cut, and columns are dequantized."""
    folder = folder_of(name, tmp_path, width)
    whole, parts = experts_of(folder), [experts_of(folder, Shard(rank, 2)) for rank in range(2)]
    for number, (first, last) in enumerate(zip(numbers_of(whole.gate_up), numbers_of(whole.down), strict=True)):
        firsts = [numbers_of(part.gate_up)[number].view(2, -1, HIDDEN) for part in parts]
        assert torch.equal(torch.cat(firsts, 1).view(-1, HIDDEN), first)
        assert torch.equal(torch.cat([numbers_of(part.down)[number] for part in parts], 1), last)
    rows = {linear.quantized.scale_rows for linear in parts[1].gate_up if isinstance(linear.quantized, ExpertFp8)}
    assert rows == {{"fp8-per-channel": 1, "fp8-blocks": math.gcd(128, width // 2)}.get(name, width // 2)}
    assert stay(parts[1].down) == (width == 256)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("width", [128, 192])
def test_experts_that_are_stored_in_one_tensor_keep_their_blocks(width: int, tmp_path: Path) -> None:
    """With a width of 192 a block has rows of the gate and of what it is multiplied by."""
    sizes = {**QWEN3_NEXT, "hidden_size": HIDDEN, "moe_intermediate_size": width}
    save(Case("experts", Qwen3_5MoeTextConfig, sizes), tmp_path / "plain")
    stack(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "fp8", "fp8-blocks", 128)
    experts, stored = experts_of(tmp_path / "fp8", layer=0), dequantize_folder(tmp_path / "fp8")
    assert stay(experts.gate_up)
    first, last = numbers_of(experts.gate_up), numbers_of(experts.down)
    begins = "model.layers.0.mlp.experts."
    assert torch.equal(torch.stack(first), stored[f"{begins}gate_up_proj"].bfloat16())
    assert torch.equal(torch.stack(last), stored[f"{begins}down_proj"].bfloat16())


def tensor_bytes(linears: tuple[Linear, ...]) -> int:
    quantized = [linear.quantized for linear in linears if isinstance(linear.quantized, ExpertFp8)]
    return sum(one.numbers.nbytes + one.scales.nbytes for one in quantized)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_computed_before_experts_are_read_are_those_that_they_take(
    name: str, ranks: int, tmp_path: Path
) -> None:
    folder = folder_of(name, tmp_path, 256)
    checkpoint = open_checkpoint(folder)
    config, stored, computed = load_config(checkpoint), checkpoint.tensors(), 0
    kinds: tuple[Kind, ...] = ("fp8",)
    for one in described_stacks(config, Shard(0, ranks))[2]:
        if one.experts and f".{config.num_layers - 1}." in one.names[0]:
            held = held_quantized(one, stored, torch.bfloat16, "cuda", kinds)
            assert held is not None, one.names[0]
            computed += held.size_bytes(*one.own_shape)
    experts = experts_of(folder, Shard(0, ranks))
    assert computed == tensor_bytes(experts.gate_up) + tensor_bytes(experts.down)
    held_as = {one.held_as: one.tensors for one in weight_formats(checkpoint, config, torch.bfloat16, "cuda")}
    assert held_as["fp8"] >= 3 * COUNT


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("of", [1, 2])
def test_quantize_makes_experts_fp8_with_a_scale_for_each_output_of_all_ranks(of: int, tmp_path: Path) -> None:
    folder_of("fp8-blocks", tmp_path, 256)
    whole = experts_of(tmp_path / "plain", quantize="fp8")
    part = experts_of(tmp_path / "plain", Shard(of - 1, of), "fp8")
    width = 256 // of
    assert stay(part.down) and torch.equal(numbers_of(part.down)[1], numbers_of(whole.down)[1][:, 256 - width :])
    assert torch.equal(numbers_of(part.gate_up)[1][-width:], numbers_of(whole.gate_up)[1][-width:])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_random_experts_become_fp8_too(tmp_path: Path) -> None:
    config = load_config(open_checkpoint(folder_of("fp8-blocks", tmp_path, 128)))
    weights = dummy_weights(config, torch.bfloat16, CPU, torch.Tensor.contiguous, quantize="fp8")
    found = weights.layers[-1].feed_forward
    assert isinstance(found, Experts) and stay(found.gate_up) and stay(found.down)


@pytest.mark.parametrize(
    ("name", "width", "options"),
    [
        ("fp8-blocks", 128, ("cpu", torch.bfloat16)), ("fp8-blocks", 128, ("cuda", torch.float16)),
        ("int4-packed", 128, ("cuda", torch.bfloat16)), ("fp8-per-channel", 192, ("cuda", torch.bfloat16)),
    ],
    ids=["on a CPU", "in float16", "in INT4", "depth of 192"],
)  # fmt: skip
def test_other_experts_are_dequantized(name: str, width: int, options: tuple[str, torch.dtype], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of(name, tmp_path, width))
    stored, (device, dtype) = checkpoint.tensors(), options
    stacks = [one for one in described_stacks(load_config(checkpoint))[2] if one.experts]
    downs = [one for one in stacks if "down_proj" in one.names[0]]
    assert downs and not any(held_quantized(one, stored, dtype, device, ("fp8", "int4")) for one in downs)


@pytest.mark.parametrize("name", ["30B-A3B", "7B-A1B", "40B-A3B-delta"])
def test_fp8_halves_the_memory_of_models_with_experts(name: str) -> None:
    config = SHAPES[name].described()
    plain, fp8 = (held_bytes(None, config, torch.bfloat16, "cuda", quantize) for quantize in ("none", "fp8"))
    assert fp8 < 0.56 * plain
    assert held_bytes(None, config, torch.bfloat16, "cuda", "int4") == plain
