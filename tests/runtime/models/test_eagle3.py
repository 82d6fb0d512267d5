"""Folders of draft heads of EAGLE-3 that are served, and those that are refused, each by its own sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Layer
from runahead.runtime.models.memory import memory_of, weight_bytes
from tests.runtime.models.eagle3_heads import KNOWN, NARROW, WHOLE, random_head, write_head3
from tests.runtime.models.eagle_heads import HIDDEN, VOCAB
from tests.runtime.models.test_eagle import as_it_is, opened

TENSORS = random_head()
NO_INTEGERS = ("d2t", "t2d")


def test_its_numbers_are_those_of_its_tensors(tmp_path: Path) -> None:
    weights = opened(write_head3(tmp_path, TENSORS)).weights(as_it_is)
    numbers = [tensor.numel() for name, tensor in TENSORS.items() if name not in NO_INTEGERS]
    assert weights.parameters == sum(numbers)
    assert weights.embedding is None and weights.lm_head is not None
    assert weights.targets is not None
    assert weights.targets.tolist() == torch.nonzero(TENSORS["t2d"]).flatten().tolist()


@pytest.mark.parametrize(
    ("architecture", "prefix", "layer"),
    [
        ("LlamaForCausalLM", "", "midlayer."),
        ("LlamaForCausalLMEagle3", "", "layers.0."),
        ("Eagle3LlamaForCausalLM", "model.", "midlayer."),
    ],
)
def test_every_published_way_to_name_tensors_is_read(
    architecture: str, prefix: str, layer: str, tmp_path: Path
) -> None:
    renamed = {prefix + name.replace("midlayer.", layer): tensor for name, tensor in TENSORS.items()}
    weights = opened(write_head3(tmp_path, renamed, architectures=[architecture])).weights(as_it_is)
    assert torch.equal(weights.mixer.o.weight, TENSORS["midlayer.self_attn.o_proj.weight"])
    assert weights.lm_head is not None and torch.equal(weights.lm_head, TENSORS["lm_head.weight"])


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        ({}, (2, 1, 0)),
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 1, 0)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, (0, 2, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}, (2, 1, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2], "use_aux_hidden_state": True}}, (2, 2, 3)),
    ],
)
def test_it_reads_the_layers_that_it_names(given: dict[str, Any], reads: tuple[int, ...], tmp_path: Path) -> None:
    """Of a model of three layers; a list that begins with 1 counts them as what leaves the state."""
    assert opened(write_head3(tmp_path, TENSORS, **given)).weights(as_it_is).reads == reads


def test_a_configuration_as_model_optimizer_writes_it_is_read(tmp_path: Path) -> None:
    written = {
        "eagle_aux_hidden_state_layer_ids": [1, 0, 2], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
    }  # fmt: skip
    plain = opened(write_head3(tmp_path / "plain", TENSORS)).weights(as_it_is)
    head = opened(write_head3(tmp_path / "written", TENSORS, eagle_config=written)).weights(as_it_is)
    assert head.reads == (2, 1, 3)
    assert torch.equal(head.mixer.qkv.weight, plain.mixer.qkv.weight)


def test_a_null_beside_eagle_config_does_not_hide_what_is_in_it(tmp_path: Path) -> None:
    folder = write_head3(tmp_path, TENSORS, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": None}), "utf-8")
    assert opened(folder).weights(as_it_is).reads == (0, 2, 3)


def test_what_is_missing_is_the_targets(tmp_path: Path) -> None:
    tensors = random_head(known=VOCAB)
    del tensors["lm_head.weight"]
    weights = opened(write_head3(tmp_path, tensors, **WHOLE)).weights(as_it_is)
    assert (weights.embedding, weights.lm_head, weights.targets) == (None, None, None)


def test_an_embedding_of_its_own_is_its_own(tmp_path: Path) -> None:
    tensors = random_head(width=NARROW)
    weights = opened(write_head3(tmp_path, tensors, hidden_size=NARROW)).weights(as_it_is)
    assert weights.embedding is not None and torch.equal(weights.embedding, tensors["embed_tokens.weight"])


def test_it_says_what_its_weights_take_and_which_products_it_has(tmp_path: Path) -> None:
    head = opened(write_head3(tmp_path, TENSORS))
    weights = head.weights(as_it_is)
    assert weights.targets is not None
    assert 4 * head.parameters + weights.targets.nbytes == weight_bytes(weights)
    assert head.shapes() == [
        (3 * HIDDEN, HIDDEN), (2 * HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 192), (96, HIDDEN), (HIDDEN, KNOWN)
    ]  # fmt: skip


@pytest.mark.parametrize("width", [HIDDEN, NARROW])
def test_it_takes_of_a_block_what_it_is_said_to(width: int, tmp_path: Path) -> None:
    head = opened(write_head3(tmp_path, random_head(width=width), hidden_size=width))
    weights = head.weights(as_it_is)
    cache = memory_of((Layer(weights.mixer, weights.feed_forward),)).make_cache(
        3, 16, torch.float32, torch.device("cpu")
    )
    kept = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) + 3 * 16 * width * 4
    assert 3 * head.block_bytes(16) == kept


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 161}, "has a vocabulary of 161 tokens, and the model one of 160"),
        ({"target_hidden_size": 128}, "reads hidden states of 128 numbers, and the model leaves 64"),
        ({"max_position_embeddings": 255}, "has a context of 255 tokens, and 256 are served: set --context-length to"),
        ({"num_hidden_layers": 2}, "has 2 layers; heads of one layer are served"),
        (
            {"architectures": ["Eagle3Speculator"]},
            r"is \['Eagle3Speculator'\]; a head of EAGLE-3",
        ),
        ({"hidden_size": 128}, r"has no tensor embed_tokens.weight, and the model's embedding, of 64 numbers a token"),
        ({"draft_vocab_size": 99}, "tensor d2t must be 99 integers"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; it must be an integer of at least 1"),
        ({"norm_before_residual": 1}, "norm_before_residual is 1; it must be true or false"),
        ({"norm_before_fc": True}, "has no tensor input_norm.weight"),
        ({"fc_norm": True}, "has no tensor fc_norm.0.weight"),
        ({"norm_before_fc": True, "eagle_config": {"fc_norm": True}}, "norm_before_fc and fc_norm are both true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false; only true is served"),
        ({"eagle_config": {"norm_before_fc": True}}, "has no tensor input_norm.weight"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is true; only false is served"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is false; only true is served"),
        (
            {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
            "use_input_layernorm_in_first_layer is false; only true is served",
        ),
        (
            {"eagle_config": {"parallel_draft_step": 2}},
            "parallel_draft_step is 2; heads that guess one token in a step are served",
        ),
        ({"eagle_config": {"parallel": 2}}, "eagle_config has keys that are not understood: parallel"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\]; it must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"layer_ids is \[2, 3\]; it must be a list of 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": 7}, r"layer_ids is 7; it must be a list of 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "and the model has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, -1, 3]}, "and the model has 3 layers"),
        ({"add_para_norm": True}, "keys that are not understood for LlamaForCausalLM .*: add_para_norm"),
        ({"intermediate_size": 97}, r"tensor midlayer.mlp.gate_proj.weight has shape \[96, 64\]"),
        ({"attention_bias": True}, "has no tensor midlayer.self_attn.q_proj.bias"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    folder = write_head3(tmp_path, TENSORS, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


SHIFTED = TENSORS["d2t"].clone()
SHIFTED[-1] = VOCAB - KNOWN + 1
TWICE = TENSORS["d2t"].clone()
TWICE[1] = TWICE[0] - 1


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("fc.weight", None, "has no tensor fc.weight"),
        ("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN), r"tensor fc.weight has shape \[64, 128\]"),
        ("midlayer.hidden_norm.weight", None, "has no tensor midlayer.hidden_norm.weight"),
        ("midlayer.self_attn.q_proj.weight", torch.zeros(64, 64), r"q_proj.weight has shape \[64, 64\]"),
        ("lm_head.weight", None, "has no tensor lm_head.weight, and the model's own, 160 tokens of 64 numbers"),
        ("lm_head.weight", torch.zeros(VOCAB, HIDDEN), r"tensor lm_head.weight has shape \[160, 64\]"),
        ("embed_tokens.weight", torch.zeros(VOCAB + 1, HIDDEN), "tensor embed_tokens.weight has shape"),
        ("d2t", None, "has no tensor d2t: nothing says which of the model's 160 tokens the 100"),
        ("d2t", TENSORS["d2t"].float(), "tensor d2t must be 100 integers of 64 or 32 bits"),
        ("d2t", SHIFTED, "tensor d2t must give each of 100 tokens one of the model's 160 to itself"),
        ("d2t", TWICE, "tensor d2t must give each of 100 tokens one of the model's 160 to itself"),
        ("d2t", -1 - torch.arange(KNOWN), "tensor d2t must give each of 100 tokens one of the model's 160 to itself"),
        ("t2d", torch.zeros(VOCAB - 1, dtype=torch.bool), "tensor t2d must say of each of the model's 160 tokens"),
        ("t2d", torch.roll(TENSORS["t2d"], 1), "tensor t2d names other tokens than d2t"),
        ("layers.0.hidden_norm.weight", torch.ones(HIDDEN), "has a tensor twice"),
        ("input_norm.weight", torch.ones(3 * HIDDEN), "has a tensor input_norm.weight, which a head of EAGLE-3 does"),
        ("mask_hidden", torch.ones(HIDDEN), "has a tensor mask_hidden, which a head of EAGLE-3 does not have"),
    ],
)
def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    tensors = {**TENSORS, name: tensor}
    folder = write_head3(tmp_path, {key: value for key, value in tensors.items() if value is not None})
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)
