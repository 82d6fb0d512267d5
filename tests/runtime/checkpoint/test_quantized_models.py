"""Quantized checkpoints of each format compute what transformers computes with the weights that a plain reader finds
in the same files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.checkpoint.quantized import tensor as quantized_tensor
from runahead.runtime.checkpoint.quantized.read_config import read_quantization
from runahead.runtime.checkpoint.quantized.tensor import QuantizedTensor
from runahead.runtime.kernels.layers import Attention
from runahead.runtime.kernels.quantized_weight import QuantizedWeight
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.models.cpu_check.self_test import Trial
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.load import load_model
from tests.runtime.checkpoint.quantize import FORMATS, quantize
from tests.runtime.checkpoint.quantized_reader import dequantize_folder
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.test_architectures_at_every_depth import DEPTHS, assert_greedy, completions, prompts
from tests.runtime.models.test_stacked_experts import stack

TOLERANCE = 2e-4
GROUP = 16
COUNT = 12  # tokens: each product dequantizes its matrix
BY_NAME = {case.name: case for case in CASES}
# Formats by an architecture: each format once, each kind of layer at least once.
PAIRS = (
    ("llama_tied_biased", "fp8-per-tensor"),
    ("qwen2", "fp8-per-channel"),
    ("llama_deep_sums", "fp8-blocks"),
    ("llama_deep_sums", "fp8-blocks-compressed"),
    ("phi3", "fp8-static"),
    ("gemma3", "modelopt-per-tensor"),
    ("qwen3_wide_heads", "modelopt-per-channel"),
    ("llama_bfloat16_sharded", "int8-per-channel"),
    ("llama", "int4-packed"),
    ("qwen3_next", "int4-packed-zeros"),
    ("mixtral_window", "int4-packed-ordered"),
    ("nemotron_h", "int8-packed"),
    ("qwen2_windows", "gptq-int4"),
    ("qwen3_moe_dense_between", "gptq-int4-ordered"),
    ("bamba", "gptq-v2-int4"),
    ("granite", "gptq-int8"),
    ("qwen3_biased_grouped", "awq-int4"),
    ("granite_hybrid", "fp8-blocks"),
)


def made(case: str, name: str, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """The quantized checkpoint, and transformers' model of the weights that the plain reader finds in it, float32."""
    plain, folder, oracle = tmp_path / "plain", tmp_path / "quantized", tmp_path / "oracle"
    save(BY_NAME[case], plain)
    quantize(plain, folder, name, group_of(case))
    oracle.mkdir()
    save_file(dequantize_folder(folder), oracle / "model.safetensors", {"format": "pt"})
    (oracle / "config.json").write_text((plain / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32, attn_implementation="eager")
    return folder, model.eval()


def group_of(case: str) -> int:
    """Columns that share a scale, of which every layer has a multiple."""
    changes = BY_NAME[case].changes
    return 8 if changes.get("hidden_size") == 72 or changes.get("moe_intermediate_size") == 40 else GROUP


def decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(open_checkpoint(folder), torch.device("cpu"), dtype, "auto", ReferenceKernels())


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a weight has several."""
    monkeypatch.setattr(quantized_tensor, "_PIECE", 1 << 10)
    yield


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=map("-".join, PAIRS))
def test_logits_and_greedy_tokens_in_serial_and_at_the_deepest_chain(case: str, name: str, tmp_path: Path) -> None:
    """Each case has every depth with its own weights (`test_architectures_at_every_depth.py`), and matrices that stay
    quantized have them (`test_quantized_linears.py`)."""
    folder, oracle = made(case, name, tmp_path)
    ours, vocab = decoder(folder), oracle.config.vocab_size
    prompt = prompts(vocab)[2]
    with torch.inference_mode():
        found = Trial(ours, [prompt], len(prompt), 16, seed=1).advance([(0, len(prompt))])[0]
        assert (found - oracle(torch.tensor([prompt])).logits[0]).abs().max() <= TOLERANCE
    serial = completions(folder, 0, vocab, count=COUNT)
    for handle, prompt in enumerate(prompts(vocab)):
        assert len(serial[handle]) == COUNT
        assert_greedy(oracle, prompt, serial[handle])
    assert completions(folder, DEPTHS[-1], vocab, count=COUNT) == serial


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_definition_to_the_bit(name: str, tmp_path: Path) -> None:
    save(BY_NAME["llama"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", name, GROUP)
    stored, expected = open_checkpoint(tmp_path / "quantized").tensors(), dequantize_folder(tmp_path / "quantized")
    assert stored.keys() == expected.keys()
    quantized = {key: tensor for key, tensor in stored.items() if isinstance(tensor, QuantizedTensor)}
    assert len(quantized) == 21, "seven linear layers in each of three"
    for key, tensor in quantized.items():
        found = np.full(tensor.shape, np.nan, np.float32)
        pieces = list(tensor.pieces())
        for rows, numbers in pieces:
            found[rows] = numbers
        assert len(pieces) > 1
        assert np.array_equal(found, expected[key].numpy()), key


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_pattern_is_the_number_of_the_definition(name: str, tmp_path: Path) -> None:
    """Numbers and zero points are drawn over all their bits; FP8's NaN, which is refused, is left out."""
    save(BY_NAME["llama"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", name, GROUP)
    path = tmp_path / "quantized" / "model.safetensors"
    drawn, generator = load_file(path), np.random.default_rng(5)
    for key, tensor in drawn.items():
        if tensor.dtype == torch.int32 and not key.endswith("g_idx"):
            words = generator.integers(-(2**31), 2**31, tuple(tensor.shape), np.int32)
            drawn[key] = torch.from_numpy(words)
        elif tensor.itemsize == 1:
            numbers = generator.integers(0, 127, tuple(tensor.shape), np.uint8)
            signs = generator.integers(0, 2, tuple(tensor.shape), np.uint8) << 7
            drawn[key] = torch.from_numpy(numbers | signs).view(tensor.dtype)
    save_file(drawn, path)
    stored, expected = open_checkpoint(tmp_path / "quantized").tensors(), dequantize_folder(tmp_path / "quantized")
    for key, made_of in stored.items():
        if isinstance(made_of, QuantizedTensor):
            found = np.concatenate([numbers for _, numbers in made_of.pieces()])
            assert np.array_equal(found, expected[key].numpy()), key


def test_blocks_are_the_same_under_the_name_that_modelopt_gives_them(tmp_path: Path) -> None:
    save(BY_NAME["llama_deep_sums"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "fp8-blocks")
    before = open_checkpoint(tmp_path / "quantized").tensors()
    config = tmp_path / "quantized" / "config.json"
    described = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": described}))
    assert open_checkpoint(tmp_path / "quantized").tensors() == before


def test_scales_of_blocks_may_have_four_sizes_and_those_of_the_cache_are_passed_over(tmp_path: Path) -> None:
    save(BY_NAME["llama_deep_sums"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "fp8-blocks")
    expected = numbers_of(tmp_path / "quantized")
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path)
    for name in [key for key in tensors if key.endswith("_scale_inv")]:
        tensors[name] = tensors[name][:, None, :, None].contiguous()
    tensors["model.layers.0.self_attn.kv_scale"] = torch.ones(1)
    save_file(tensors, path)
    found = numbers_of(tmp_path / "quantized")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def numbers_of(folder: Path) -> dict[str, Any]:
    stored = open_checkpoint(folder).tensors()
    decoder(folder)
    return {
        name: np.concatenate([numbers for _, numbers in tensor.pieces()])
        for name, tensor in stored.items()
        if isinstance(tensor, QuantizedTensor)
    }


def test_the_name_of_a_layer_is_no_class_and_older_files_say_frozen() -> None:
    weights = {"type": "int", "num_bits": 8, "strategy": "channel"}
    described = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "frozen",
        "config_groups": {
            "group_0": {"targets": ["lm_head"], "weights": weights, "format": "int-quantized"},
            "group_1": {
                "targets": ["Linear"], "weights": {**weights, "num_bits": 4, "strategy": "group", "group_size": 16},
                "format": "pack-quantized",
            },
        },
    }  # fmt: skip
    quantization = read_quantization({"quantization_config": described})
    assert quantization is not None
    assert quantization.scheme_of("lm_head").bits == 8
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj").bits == 4


def test_each_group_of_layers_has_its_own_scheme_and_a_pattern_counts_before_a_class(tmp_path: Path) -> None:
    save(BY_NAME["llama"], tmp_path / "plain")
    kinds = {"float-quantized": "fp8-per-channel", "pack-quantized": "int4-packed"}
    layers = {"float-quantized": "self_attn", "pack-quantized": "mlp"}
    targets = {"float-quantized": ["re:.*self_attn.*"], "pack-quantized": ["Linear"]}
    groups: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for stored_as, name in kinds.items():
        quantize(tmp_path / "plain", tmp_path / name, name, GROUP)
        raw = json.loads((tmp_path / name / "config.json").read_text())
        group = raw["quantization_config"]["config_groups"]["group_0"]
        groups[stored_as] = {**group, "targets": targets[stored_as], "format": stored_as}
        for found, folder in (
            (tensors, load_file(tmp_path / name / "model.safetensors")),
            (expected, dequantize_folder(tmp_path / name)),
        ):
            found.update({key: tensor for key, tensor in folder.items() if f".{layers[stored_as]}." in key})
    # The class comes first in the file: the pattern is looked for in all groups.
    described = {"config_groups": dict(reversed(groups.items())), "format": "mixed-precision"}
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    save_file(tensors, mixed / "model.safetensors")
    (mixed / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "compressed-tensors", **described}})
    )
    stored = open_checkpoint(mixed).tensors()
    assert stored.keys() == expected.keys()
    assert Counter(tensor.dtype for tensor in stored.values()) == {"fp8 per-channel": 12, "int4 groups of 16": 9}
    for key, tensor in stored.items():
        assert isinstance(tensor, QuantizedTensor)
        assert np.array_equal(np.concatenate([rows for _, rows in tensor.pieces()]), expected[key].numpy())


def test_formats_of_all_pairs_are_all_that_the_script_writes() -> None:
    assert {name for _, name in PAIRS} == set(FORMATS)


def test_experts_of_one_tensor_are_those_that_lie_alone(tmp_path: Path) -> None:
    """The rows of up begin within a block of 128, and end in the next one."""
    case = BY_NAME["qwen3_next"]
    save(replace(case, changes={**case.changes, "moe_intermediate_size": 100}), tmp_path / "plain")
    stack(tmp_path / "plain", ("model.",))
    quantize(tmp_path / "plain", tmp_path / "quantized", "fp8-blocks")
    expected = dequantize_folder(tmp_path / "quantized")
    oracle = tmp_path / "dequantized"
    oracle.mkdir()
    save_file(expected, oracle / "model.safetensors", {"format": "pt"})
    (oracle / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    tokens = prompts(160)[2]
    with torch.inference_mode():
        found, same = (
            Trial(decoder(folder), [tokens], len(tokens), 16, seed=1).advance([(0, len(tokens))])[0]
            for folder in (tmp_path / "quantized", oracle)
        )
    assert torch.equal(found, same)
    raw = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert raw["quantization_config"]["weight_block_size"] == [128, 128]


def test_biases_of_zeros_that_the_model_does_not_have_are_passed_over(tmp_path: Path) -> None:
    """Tools of GPTQ give every quantized layer a bias."""
    save(BY_NAME["llama"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "gptq-int4", GROUP)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(path) | {"model.layers.0.mlp.up_proj.bias": torch.zeros(96, dtype=torch.float16)}
    save_file(tensors, path)
    decoder(tmp_path / "quantized")
    tensors["model.layers.0.mlp.up_proj.bias"][95] = 0.5
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"has a tensor model\.layers\.0\.mlp\.up_proj\.bias, which Llama"):
        decoder(tmp_path / "quantized")


def test_the_dtype_that_is_served_gets_each_number_rounded_once(tmp_path: Path) -> None:
    save(BY_NAME["llama"], tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "quantized", "gptq-int4", GROUP)
    exact, rounded = decoder(tmp_path / "quantized"), decoder(tmp_path / "quantized", torch.bfloat16)
    for one, other in zip(exact.weights.layers, rounded.weights.layers, strict=True):
        assert isinstance(one.mixer, Attention) and isinstance(other.mixer, Attention)
        ours, theirs = one.mixer.qkv.quantized, other.mixer.qkv.quantized
        assert isinstance(ours, QuantizedWeight) and isinstance(theirs, QuantizedWeight)
        assert torch.equal(ours.dequantized().bfloat16(), theirs.dequantized())
