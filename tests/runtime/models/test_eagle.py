"""Folders of draft heads that are served, and those that are refused, each by its own sentence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint, open_head
from runahead.runtime.kernels.layers import Layer, Linear
from runahead.runtime.kernels.reference.forward import ReferenceKernels
from runahead.runtime.kernels.reference.linear import Products, product_ways
from runahead.runtime.models.drafters.draft_head import unpacked
from runahead.runtime.models.drafters.eagle import open_eagle
from runahead.runtime.models.drafters.head_files import HeadFiles, may_have_head
from runahead.runtime.models.load import load_model
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.read_config import parse_config
from tests.runtime.models.checkpoints import CASES, save
from tests.runtime.models.eagle_heads import CONFIG, HIDDEN, VOCAB, random_head, write_head
from tests.runtime.models.public_configs import PUBLIC

TARGET = parse_config({**CONFIG, "num_hidden_layers": 3}, ())


def opened(folder: Path, context: int = 256) -> HeadFiles:
    return open_eagle(open_head(folder), TARGET, context, "--draft-model", "--context-length")


def fused(head: HeadFiles) -> Linear:
    """The product that it begins with."""
    product = head.weights(as_it_is).fuse.product
    assert product is not None
    return product


def as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def test_a_head_without_its_embedding_has_its_own_numbers_alone(tmp_path: Path) -> None:
    tensors = random_head()
    head = opened(write_head(tmp_path, tensors))
    assert head.weights(as_it_is).parameters == sum(tensor.numel() for tensor in tensors.values())
    assert torch.equal(fused(head).weight, tensors["fc.weight"])
    assert fused(head).bias is None


def test_logits_of_the_targets_matrix_are_bounded_as_the_targets(tmp_path: Path) -> None:
    save(CASES[0], tmp_path / "model")
    kernels, found = ReferenceKernels(), []
    files = opened(write_head(tmp_path / "head", random_head()))
    target = load_model(open_checkpoint(tmp_path / "model"), torch.device("cpu"), torch.float32, "auto", kernels)
    hidden = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0))
    for cap in (0.0, 0.5):
        target.weights = replace(target.weights, logit_cap=cap)
        found.append(files.load(target, kernels, 128, drawn=False)._logits(hidden))
    assert torch.allclose(found[1], 0.5 * torch.tanh(found[0] / 0.5), atol=1e-6)
    assert found[0].abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_of_the_targets_embedding_is_passed_over_and_another_embedding_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    save(CASES[0], tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    target = load_model(checkpoint, torch.device("cpu"), torch.float32, "auto", ReferenceKernels())
    tensors = random_head()
    copy = target.weights.embedding.to(dtype, copy=True)
    head = opened(write_head(tmp_path / "copy", {**tensors, "embed_tokens.weight": copy}))
    head.check_copies(target)
    assert head.weights(as_it_is).parameters == sum(t.numel() for t in tensors.values())
    copy[-1] *= 1.1
    other = opened(write_head(tmp_path / "other", {**tensors, "embed_tokens.weight": copy}))
    with pytest.raises(CheckpointError, match=r"tensor embed_tokens\.weight that differs from the model's embedding"):
        other.check_copies(target)


def test_a_head_may_say_which_tokens_it_guesses(tmp_path: Path) -> None:
    """By what is added to 0, 1, 2, as heads of EAGLE-3 do."""
    some = {**random_head(), "d2t": torch.tensor([2, 2, 5])}
    assert opened(write_head(tmp_path / "some", some)).weights(as_it_is).targets.tolist() == [2, 3, 7]  # type: ignore[union-attr]
    assert opened(write_head(tmp_path / "all", random_head())).weights(as_it_is).targets is None
    for number, wrong in enumerate((torch.tensor([0, -1]), torch.tensor([VOCAB]), torch.tensor([0.5]), torch.zeros(0))):
        with pytest.raises(CheckpointError, match="tensor d2t must"):
            opened(write_head(tmp_path / str(number), {**random_head(), "d2t": wrong}))


@pytest.mark.parametrize("products", product_ways())
def test_a_packed_matrix_is_found_again(products: Products) -> None:
    matrix = torch.randn(6, 10)
    assert torch.equal(unpacked(products.pack(matrix)), matrix)


def test_a_model_whose_logits_are_scaled_has_no_head(tmp_path: Path) -> None:
    """The scale is in its last norm, whose output a head reads."""
    for name, may in (("Granite 3.3 2B", False), ("Qwen3 0.6B", True)):
        assert may_have_head(parse_config(PUBLIC[name], ())) == may
    target = parse_config(PUBLIC["Granite 3.3 2B"], ())
    with pytest.raises(CheckpointError, match=r"can't draft for this GraniteForCausalLM, whose logits_scaling"):
        open_eagle(open_head(write_head(tmp_path, random_head())), target, 256, "--draft-model", "--context-length")


@pytest.mark.parametrize("given", [None, True])
def test_a_bias_behind_the_fusion_counts_where_it_is_stored(tmp_path: Path, given: bool | None) -> None:
    tensors = random_head(bias=True)
    bias = fused(opened(write_head(tmp_path, tensors, bias=given))).bias
    assert bias is not None and torch.equal(bias, tensors["fc.bias"])


def test_biases_of_queries_keys_and_values_are_read(tmp_path: Path) -> None:
    tensors = random_head()
    for name in "qkv":
        width = tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.arange(width, dtype=torch.float32)
    qkv = opened(write_head(tmp_path, tensors, qkv_bias=True)).weights(as_it_is).mixer.qkv
    assert qkv.bias is not None and qkv.bias.tolist() == [*range(64), *range(32), *range(32)]


@pytest.mark.parametrize("architecture", ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"])
def test_names_as_of_a_whole_model_are_the_same_tensors(tmp_path: Path, architecture: str) -> None:
    tensors = random_head()
    plain = opened(write_head(tmp_path / "plain", tensors))
    whole = {f"model.{name}": tensor for name, tensor in tensors.items()}
    folder = write_head(tmp_path / "whole", whole, architectures=[architecture])
    named = opened(folder)
    assert torch.equal(fused(named).weight, fused(plain).weight)
    assert torch.equal(named.weights(as_it_is).mixer.o.weight, plain.weights(as_it_is).mixer.o.weight)


def test_it_takes_of_a_block_what_it_is_said_to(tmp_path: Path) -> None:
    head = opened(write_head(tmp_path, random_head()))
    weights = head.weights(as_it_is)
    layer = Layer(weights.mixer, weights.feed_forward)
    cache = memory_of((layer,)).make_cache(3, 16, torch.float32, torch.device("cpu"))
    kept = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) + 3 * 16 * HIDDEN * 4
    assert 3 * head.block_bytes(16) == kept


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 161}, "has a vocabulary of 161 tokens, and the model one of 160"),
        ({"hidden_size": 128}, "reads hidden states of 128 numbers, and the model leaves 64"),
        (
            {"max_position_embeddings": 255},
            "has a context of 255 tokens, and 256 are served: set --context-length to 255 or less",
        ),
        ({"num_hidden_layers": 2}, "has 2 layers; heads of one layer are served"),
        (
            {"architectures": ["MambaForCausalLM"]},
            r"architectures is \['MambaForCausalLM'\]; a head of EAGLE-1",
        ),
        ({"add_para_norm": True}, "keys that are not understood for LlamaForCausalLM .*: add_para_norm"),
        ({"bias": 3}, "bias is 3; it must be true or false"),
        ({"bias": True}, "has no tensor fc.bias"),
        ({"intermediate_size": 97}, r"tensor layers.0.mlp.gate_proj.weight has shape \[96, 64\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    folder = write_head(tmp_path, random_head(), **changes)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("fc.weight", None, "has no tensor fc.weight"),
        ("fc.weight", torch.zeros(HIDDEN, HIDDEN), r"tensor fc.weight has shape \[64, 64\]"),
        ("embed_tokens.weight", torch.zeros(VOCAB + 1, HIDDEN), "tensor embed_tokens.weight has shape"),
        ("lm_head.weight", torch.zeros(VOCAB, HIDDEN), "has a tensor lm_head.weight, which a head of EAGLE-1 does not"),
        ("layers.0.input_layernorm.weight", torch.ones(HIDDEN), "has a tensor layers.0.input_layernorm.weight"),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    tensors = {**random_head(), name: tensor}
    folder = write_head(tmp_path, {key: value for key, value in tensors.items() if value is not None})
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


def test_a_bias_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path, random_head(bias=True), bias=False)
    with pytest.raises(CheckpointError, match=r"has a tensor fc.bias"):
        opened(folder)


def test_a_file_that_may_run_code_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write_head(tmp_path, random_head())
    (folder / "model.safetensors").rename(folder / "head.pth")
    with pytest.raises(CheckpointError, match=r"head.pth can't .*may run code.*save_file"):
        opened(folder)


def test_what_the_refusal_of_such_a_file_says_makes_a_head_of_it(tmp_path: Path) -> None:
    tensors = random_head()
    folder = write_head(tmp_path, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError) as refusal:
        opened(folder)
    code = str(refusal.value).split('python -c "')[1].split('"`')[0]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert torch.equal(fused(opened(folder)).weight, tensors["fc.weight"])


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path, random_head())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tensor .* ends"):
        opened(folder)


def test_what_is_no_folder_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nowhere is no folder with config.json and model.safetensors or pytorch_model.bin$"
    ):
        opened(tmp_path / "nowhere")
