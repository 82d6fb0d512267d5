"""Matrices that stay quantized in memory: their numbers, their bytes, ranks' parts of them, and FP8 made at load."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from benchmarks.gpu_table.shapes import SHAPES
from runahead.runtime.checkpoint import BUNDLED_FOLDER, CheckpointError, open_checkpoint
from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.layers import Attention, Dense, Layer, Linear
from runahead.runtime.kernels.quantized_weight import (
    Fp8Weight,
    Kind,
    QuantizedWeight,
    quantized_bytes,
    quantized_to_fp8,
    quantized_to_int4,
)
from runahead.runtime.kernels.ranks import WHOLE, Shard
from runahead.runtime.models.architecture import ModelWeights, TensorReader, TensorStack
from runahead.runtime.models.memory import weight_bytes
from runahead.runtime.models.quantized_linears import held_quantized, read_quantized
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.weight_formats import held_bytes, some_stay_quantized
from runahead.runtime.models.weights import described_stacks, dummy_weights, load_weights
from runahead.runtime.wire.engine_config import EngineConfig
from tests.runtime.assembled import assembled
from tests.runtime.checkpoint.quantize import FORMATS, quantize
from tests.runtime.checkpoint.quantized_reader import dequantize_folder
from tests.runtime.kernels.test_expert_shares import ranks
from tests.runtime.models.checkpoints import CASES, Case, save
from tests.runtime.models.test_architectures_at_every_depth import completions
from tests.runtime.models.test_shares_of_dense_models import check_parts

CPU = torch.device("cpu")
GROUP = 16


def folder_of(case: str, name: str, tmp_path: Path, group: int = GROUP) -> Path:
    save(next(one for one in CASES if one.name == case), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", name, group)
    return tmp_path / "quantized"


def load(folder: Path, shard: Shard = WHOLE, dtype: torch.dtype = torch.float32, **more: Any) -> ModelWeights:
    checkpoint = open_checkpoint(folder)
    return load_weights(checkpoint, load_config(checkpoint), dtype, CPU, lambda weight: weight, shard=shard, **more)


def quantized_in(weights: ModelWeights) -> list[QuantizedWeight]:
    every = [linear.quantized for layer in weights.layers for linear in products_of(layer)]
    return [found for found in every if isinstance(found, QuantizedWeight)]


def dequantized(weights: ModelWeights) -> ModelWeights:
    """With the numbers of quantized matrices in their place."""

    def plain(part: Any) -> Any:
        if isinstance(part, Linear):
            found = part.quantized
            return Linear(found.dequantized(), part.bias) if isinstance(found, QuantizedWeight) else part
        if isinstance(part, Layer | Attention | Dense):
            return replace(part, **{field.name: plain(getattr(part, field.name)) for field in fields(part)})
        return part

    return replace(weights, layers=tuple(map(plain, weights.layers)))


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_of_every_format_stay_quantized_and_have_the_numbers_of_the_definition(
    name: str, tmp_path: Path
) -> None:
    """But for columns in the order of activations, which are dequantized while they are loaded."""
    folder = folder_of("llama", name, tmp_path)
    weights, expected = load(folder), dequantize_folder(folder)
    stay = 0 if "ordered" in name else 4 * len(weights.layers)
    assert len(quantized_in(weights)) == stay
    for number, layer in enumerate(dequantized(weights).layers):
        assert isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, Dense)
        prefix = f"model.layers.{number}."
        for linear, names in (
            (layer.mixer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.mixer.o, ("self_attn.o_proj",)),
            (layer.feed_forward.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.feed_forward.down, ("mlp.down_proj",)),
        ):
            parts = [expected[f"{prefix}{name}.weight"] for name in names]
            assert torch.equal(linear.weight, torch.cat(parts)), names


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "fp8-per-channel"), ("llama", "fp8-per-tensor"), ("llama_deep_sums", "fp8-blocks"),
        ("phi3", "int4-packed-zeros"), ("qwen3_biased_grouped", "awq-int4"), ("llama", "gptq-int8"),
    ],
)  # fmt: skip
def test_ranks_have_the_whole_model_s_numbers_between_them(case: str, name: str, tmp_path: Path) -> None:
    folder = folder_of(case, name, tmp_path, 8)
    parts = [load(folder, shard) for shard in ranks(2)]
    assert any(map(quantized_in, parts))
    check_parts(dequantized(load(folder)), [dequantized(part) for part in parts])


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_reckoned_before_the_weights_are_read_are_those_that_they_take(name: str, tmp_path: Path) -> None:
    folder = folder_of("llama", name, tmp_path)
    checkpoint = open_checkpoint(folder)
    reckoned = held_bytes(checkpoint, load_config(checkpoint), torch.bfloat16, "cpu")
    taken = weight_bytes(load(folder, dtype=torch.bfloat16))
    # GPTQ and AWQ always store zero points, which need no memory where all are half of the range.
    assert 0 <= reckoned - taken <= 0.06 * taken
    if "gptq" not in name and "awq" not in name:
        assert reckoned == taken
    plain = open_checkpoint(tmp_path / "plain")
    whole = held_bytes(plain, load_config(plain), torch.bfloat16, "cpu")
    assert (reckoned < whole) == ("ordered" not in name)


@pytest.mark.parametrize(("name", "stays"), [("fp8-per-channel", True), ("fp8-blocks", True), ("awq-int4", False)])
def test_a_gpu_holds_fp8_as_it_is_where_scales_are_for_rows_or_128_columns_and_others_in_16_bits(
    name: str, stays: bool, tmp_path: Path
) -> None:
    quantize(BUNDLED_FOLDER, tmp_path, name, 16)
    checkpoint = open_checkpoint(tmp_path)
    config = load_config(checkpoint)
    plain = held_bytes(open_checkpoint(BUNDLED_FOLDER), config, torch.bfloat16, "cuda")
    found = held_bytes(checkpoint, config, torch.bfloat16, "cuda")
    assert (found < plain) == stays and (stays or found == plain)
    assert some_stay_quantized(checkpoint, config, torch.bfloat16, "cuda", "none") == stays


@pytest.mark.parametrize("in_blocks", [False, True])
def test_bytes_on_a_gpu_are_those_of_the_numbers_and_of_scales_for_blocks_and_channels(in_blocks: bool) -> None:
    weight = quantized_to_fp8(torch.randn((272, 640), generator=torch.Generator().manual_seed(0)))
    if in_blocks:
        scales = torch.rand((5, 3), generator=torch.Generator().manual_seed(1)).repeat_interleave(128, 1)[:, :272]
        weight = replace(weight, scales=scales.contiguous(), group=128)
    packed = weight.for_gpu()
    assert isinstance(packed, Fp8Weight) and packed.blocks.shape == (3, 8)
    shared = packed.channels is not None  # by all matrices of a shape, which have ones
    taken = packed.channels.nbytes if packed.channels is not None else packed.blocks.nbytes + packed.by_output.nbytes
    assert shared != in_blocks and packed.numbers.nbytes + taken == quantized_bytes(
        "fp8", 272, 640, weight.group, 2, "cuda", has_zero_points=False
    )
    scales = packed.blocks[:, :5].repeat_interleave(128, 0)[:272].repeat_interleave(128, 1)
    assert torch.equal(packed.by_output.t().repeat_interleave(128, 1), scales)
    made = packed.numbers.float() * scales * (1.0 if packed.channels is None else packed.channels[:, None])
    assert torch.equal(made, weight.dequantized().float())


@pytest.mark.parametrize(
    ("order", "stays"),
    [
        (torch.arange(256).view(2, 128).flip(0).flatten(), True),
        (torch.arange(256).view(2, 2, 64).flip(1).flatten(), True),
        (torch.arange(256).view(4, 64)[[0, 2, 1, 3]].flatten(), False), (torch.arange(256).roll(1), False),
    ],
    ids=["blocks", "within-blocks", "halves-of-blocks", "by-one"],
)  # fmt: skip
def test_rows_that_leave_their_block_are_dequantized_on_a_gpu_and_counted_as_such(
    order: torch.Tensor, stays: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2}
    save(Case("blocks", LlamaConfig, {**sizes, "num_key_value_heads": 2}), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "fp8-blocks", 128)
    stored, stacks = open_checkpoint(tmp_path / "quantized").tensors(), list[TensorStack]()
    kinds: tuple[Kind, ...] = ("fp8",)

    def read(stack: TensorStack) -> QuantizedWeight | None:
        stacks.append(stack)
        held = held_quantized(stack, stored, torch.bfloat16, "cuda", kinds)
        return None if held is None else read_quantized(held, stack, stored, torch.bfloat16, CPU)

    def fill(stack: TensorStack) -> torch.Tensor:
        return torch.zeros(stack.own_shape)

    name = "model.layers.0.self_attn.o_proj"
    found = TensorReader(fill, lambda weight: weight, quantized=read).linear(
        (name,), (256,), 256, bias=False, own=order
    )
    assert (found.quantized is not None) == stays and len(stacks) == 1
    if isinstance(found.quantized, QuantizedWeight):
        expected = dequantize_folder(tmp_path / "quantized")[f"{name}.weight"]
        for form in (found.quantized.dequantized(), in_16_bits(found.quantized.for_gpu())):
            assert torch.equal(form.float(), expected.bfloat16().float()[order])


def in_16_bits(weight: QuantizedWeight | Fp8Weight) -> torch.Tensor:
    """The numbers of an FP8 matrix with scales for blocks."""
    assert isinstance(weight, Fp8Weight)
    outputs, depth = weight.shape
    scales = weight.blocks[:, : depth // 128].repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
    return (weight.numbers.float() * scales).bfloat16()


@pytest.mark.parametrize(("kv_heads", "stays"), [(2, True), (1, False)])
def test_blocks_that_do_not_begin_with_128_rows_of_a_product_are_dequantized_on_a_gpu(
    kv_heads: int, stays: bool, tmp_path: Path
) -> None:
    """Keys of 64 outputs, and values of another block behind them."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": kv_heads}
    save(Case("blocks", LlamaConfig, sizes), tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "fp8-blocks", 128)
    checkpoint = open_checkpoint(tmp_path / "quantized")
    stored = checkpoint.tensors()
    kinds: tuple[Kind, ...] = ("fp8",)
    for stack in described_stacks(load_config(checkpoint))[2]:
        found = held_quantized(stack, stored, torch.bfloat16, "cuda", kinds)
        has_keys = any("self_attn.k_proj" in name for name in stack.names)
        assert (found is not None) == (stays or not has_keys), stack.names


@pytest.mark.parametrize(("dtype", "stay"), [(torch.bfloat16, True), (torch.float16, False)])
def test_a_gpu_holds_what_its_kernels_take_where_that_is_asked_for(dtype: torch.dtype, stay: bool) -> None:
    checkpoint = open_checkpoint(BUNDLED_FOLDER)
    config = load_config(checkpoint)
    plain = held_bytes(checkpoint, config, dtype, "cuda")
    assert (held_bytes(checkpoint, config, dtype, "cuda", "fp8") < plain) == stay


@pytest.mark.parametrize("name", ["8B", "8B-hybrid", "9B-hybrid"])
def test_fp8_takes_clearly_less_memory_in_every_family_of_large_products(name: str) -> None:
    config = SHAPES[name].described()
    plain = held_bytes(None, config, torch.bfloat16, "cuda")
    assert held_bytes(None, config, torch.bfloat16, "cuda", "fp8") < 0.7 * plain


def test_a_row_of_fp8_made_at_load_spans_the_range_and_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn((70, 96), generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3] = 0.0
    found = quantized_to_fp8(weight.bfloat16())
    made, given = found.dequantized().float(), weight.bfloat16().float()
    largest = found.numbers.view(torch.float8_e4m3fn).float().abs().amax(1)
    assert largest[3] == 0.0 and (largest[torch.arange(70) != 3] == 448.0).all()
    assert (made[3] == 0.0).all()
    assert (given.abs().amax(1) <= 448.0 * found.scales[0].float()).all()
    # Half of the last of three bits of the mantissa, of numbers that are normal, and bfloat16's own rounding.
    step = found.scales[0][:, None] * 2.0**-9
    assert ((made - given).abs() <= given.abs() * (2**-4 + 2**-8) + step).all()


def test_a_row_with_a_nan_has_a_scale_that_is_no_number_and_others_are_as_before() -> None:
    weight = torch.ones((3, 64))
    weight[1, 5] = float("nan")
    found = quantized_to_fp8(weight.bfloat16())
    assert found.scales[0].isnan().tolist() == [False, True, False]
    assert found.dequantized()[1].isnan().all() and found.dequantized()[::2].isfinite().all()


def test_a_group_of_int4_made_at_load_spans_the_range_and_a_group_of_zeros_stays_zero() -> None:
    weight = torch.randn((70, 320), generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, 128:256] = 0.0
    weight[4, 300] = float("nan")
    found, given = quantized_to_int4(weight.bfloat16()), weight.bfloat16().float()
    scales = found.scales.float().t().repeat_interleave(128, 1)[:, :320]
    made = found.dequantized().float()
    assert found.shape == (70, 320) and found.zero_points is None and found.group == 128
    assert made[4, 256:].isnan().all() and made[4, :256].isfinite().all()
    fine = torch.arange(70) != 4
    assert (made[3, 128:256] == 0.0).all() and (made[fine] / scales[fine]).abs().round().amax() == 8
    # Half a step, of the greatest number of a group too, and the roundings of scale and product to bfloat16.
    assert ((made - given).abs()[fine] <= scales[fine] * (0.5 + 8 * 2**-7)).all()


@pytest.mark.parametrize(("quantize", "case"), [("fp8", "llama"), ("int4", "llama")])
def test_quantize_holds_matrices_so_on_every_number_of_ranks(quantize: str, case: str, tmp_path: Path) -> None:
    """Where a rank's columns are no whole groups, no rank holds them as INT4."""
    save(next(one for one in CASES if one.name == case), tmp_path)
    whole = load(tmp_path, quantize=quantize)
    assert [found.kind for found in quantized_in(whole)] == [quantize] * 4 * len(whole.layers)
    parts = [load(tmp_path, shard, quantize=quantize) for shard in ranks(2)]
    assert {len(quantized_in(part)) for part in parts} == {(4 if quantize == "fp8" else 2) * len(whole.layers)}
    if quantize == "fp8":
        check_parts(dequantized(whole), [dequantized(part) for part in parts])
    config = load_config(open_checkpoint(tmp_path))
    drawn = dummy_weights(config, torch.float32, CPU, lambda weight: weight, quantize=quantize)
    assert len(quantized_in(drawn)) == len(quantized_in(whole))


def test_ranks_whose_columns_are_whole_groups_have_the_whole_model_s_int4(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    save(Case("groups", LlamaConfig, {**sizes, "num_key_value_heads": 2}), tmp_path)
    whole = load(tmp_path, quantize="int4")
    parts = [load(tmp_path, shard, quantize="int4") for shard in ranks(2)]
    assert [len(quantized_in(part)) for part in parts] == [4 * len(whole.layers)] * 2
    check_parts(dequantized(whole), [dequantized(part) for part in parts])


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_quantize_serves_the_same_tokens_at_every_depth_and_says_what_it_holds(
    quantize: Literal["fp8", "int4"], tmp_path: Path
) -> None:
    case = next(one for one in CASES if one.name == "llama")
    save(case, tmp_path)
    vocab = load_config(open_checkpoint(tmp_path)).vocab_size
    serial = completions(tmp_path, 0, vocab, count=12, quantize=quantize)
    for depth in (1, 2, 4):
        assert completions(tmp_path, depth, vocab, count=12, quantize=quantize) == serial
    config = EngineConfig(model=str(BUNDLED_FOLDER), quantize=quantize, max_rows=2, num_blocks=20, threads=1)
    with structlog.testing.capture_logs() as lines:
        parts = assembled(config)
    parts.device.close()
    held = {weights.held_as: weights for weights in parts.info.weights}
    assert set(held) == {quantize, "float32"} and held[quantize].stored_as == "BF16"
    (memory,) = (line for line in lines if line["event"] == "memory")
    assert memory["weight_bytes"] < 4 * (held[quantize].parameters + held["float32"].parameters)


def test_a_checkpoint_that_is_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    folder = folder_of("llama", "int4-packed", tmp_path)
    config = EngineConfig(model=str(folder), quantize="fp8", max_rows=2, num_blocks=20, threads=1)
    with pytest.raises(CheckpointError, match=r"quantize fp8 needs weights in 16 or 32 bits, and the checkpoint .* is"):
        assembled(config)


def test_matrices_that_are_quantized_in_different_ways_are_dequantized_where_they_are_one_product(
    tmp_path: Path,
) -> None:
    """Queries in FP8, keys and values in INT4, and `o` in FP8 alone."""
    save(next(one for one in CASES if one.name == "llama"), tmp_path / "plain")
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    groups: dict[str, Any] = {}
    for kind, name in (("float-quantized", "fp8-per-channel"), ("pack-quantized", "int4-packed")):
        quantize(tmp_path / "plain", tmp_path / name, name, GROUP)
        raw = json.loads((tmp_path / name / "config.json").read_text())
        packs = kind == "pack-quantized"
        target = ["re:.*(k_proj|v_proj)"] if packs else ["Linear"]
        groups[kind] = {**raw["quantization_config"]["config_groups"]["group_0"], "targets": target, "format": kind}
        for found, given in (
            (tensors, load_file(tmp_path / name / "model.safetensors")),
            (expected, dequantize_folder(tmp_path / name)),
        ):
            found.update({key: one for key, one in given.items() if ("k_proj" in key or "v_proj" in key) == packs})
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    save_file(tensors, mixed / "model.safetensors")
    described = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    (mixed / "config.json").write_text(json.dumps({**plain, "quantization_config": described}))
    mixer = load(mixed).layers[0].mixer
    assert isinstance(mixer, Attention) and mixer.o.quantized is not None and mixer.qkv.quantized is None
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(mixer.qkv.weight, torch.cat([expected[name] for name in names]))
