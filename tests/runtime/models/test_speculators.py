"""Draft heads in the format of Speculators: the same heads as by themselves, or refused, each by its own sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.models.drafters.speculators import plain_head
from tests.runtime.models import eagle3_heads, eagle_heads
from tests.runtime.models.eagle3_heads import KNOWN, write_head3
from tests.runtime.models.eagle_heads import CONFIG, write_head
from tests.runtime.models.test_eagle import as_it_is, fused, opened
from tests.runtime.models.wrapped_heads import in_wrapped_names, wrapped, write_wrapped, write_wrapped3

TENSORS3 = eagle3_heads.random_head()


def test_a_wrapped_head_of_eagle_3_is_the_head_that_is_in_it(tmp_path: Path) -> None:
    plain = opened(write_head3(tmp_path / "plain", TENSORS3)).weights(as_it_is)
    head = opened(write_wrapped3(tmp_path / "wrapped", TENSORS3)).weights(as_it_is)
    assert torch.equal(head.mixer.qkv.weight, plain.mixer.qkv.weight)
    assert head.targets is not None and plain.targets is not None and torch.equal(head.targets, plain.targets)
    assert head.lm_head is not None and torch.equal(head.lm_head, TENSORS3["lm_head.weight"])
    assert (head.parameters, head.reads, head.read_norms) == (plain.parameters, plain.reads, ())
    assert not head.fuse.normed_residual and not head.passes_normed


def test_its_norms_are_read_and_its_layers_are_those_that_a_state_goes_into(tmp_path: Path) -> None:
    """A list that begins with 1 too, which stands for other layers in a head by itself."""
    norms = ("norm_before_residual", "norm_before_fc", "norm_output")
    tensors = eagle3_heads.random_head(norms=norms)
    keys = {**dict.fromkeys(norms, True), "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head = opened(write_wrapped3(tmp_path, tensors, **keys)).weights(as_it_is)
    assert head.reads == (1, 2, 3)
    assert head.fuse.normed_residual and head.passes_normed
    assert [norm.weight.tolist() for norm in head.read_norms] == [tensors["input_norm.weight"].tolist()]


@pytest.mark.parametrize("bias", [False, True])
def test_a_wrapped_head_of_eagle_1_is_the_head_that_is_in_it(bias: bool, tmp_path: Path) -> None:
    tensors = eagle_heads.random_head(bias=bias)
    plain = opened(write_head(tmp_path / "plain", tensors))
    head = opened(write_wrapped(tmp_path / "wrapped", tensors, fusion_bias=bias))
    assert torch.equal(fused(head).weight, fused(plain).weight)
    assert (fused(head).bias is not None) == bias
    for part in ("qkv", "o"):
        ours, theirs = (getattr(each.weights(as_it_is).mixer, part).weight for each in (head, plain))
        assert torch.equal(ours, theirs)


def test_a_configuration_as_it_is_published_is_read() -> None:
    """Of EAGLE3-LLaMA3.1-Instruct-8B-converted, key for key."""
    published = {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000, "has_no_defaults_at_init": False, "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.1.0.dev14", "target_hidden_size": None,
        "torch_dtype": "float32", "transformers_version": "4.53.2",
        "transformer_layer_config": {
            "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 2048, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 1, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True, "vocab_size": 128256,
        },
    }  # fmt: skip
    plain = plain_head(published)
    assert plain.wrapped and plain.config["architectures"] == ["Eagle3LlamaForCausalLM"]
    assert (plain.config["draft_vocab_size"], plain.config["norm_before_residual"]) == (32000, False)
    assert plain.config["max_position_embeddings"] == 2048


def test_a_head_by_itself_is_left_as_it_is() -> None:
    assert plain_head(CONFIG).config is CONFIG and not plain_head(CONFIG).wrapped


GREEDY = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}


def asking(**changes: Any) -> dict[str, Any]:
    """speculators_config with these changes; a key that is None is left out."""
    how = {**wrapped("eagle3")["speculators_config"], **changes}
    return {"speculators_config": {key: value for key, value in how.items() if value is not None}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; .* eagle and eagle3 are served"),
        ({"speculators_model_type": None}, "speculators_model_type is None; of the format"),
        ({"norm_before_residual": None}, "config.json has no norm_before_residual, which is false for the library"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None; it must be an object"),
        (
            {"transformer_layer_config": {**CONFIG, "model_type": "qwen3"}},
            "transformer_layer_config has model_type 'qwen3'; a head's layer of a Llama is served",
        ),
        (
            {"transformer_layer_config": {**CONFIG, "norm_output": True}, "norm_output": False},
            "transformer_layer_config has norm_output, which stands beside it, too",
        ),
        ({"transformer_layer_config": {**CONFIG, "num_hidden_layers": 2}}, "has 2 layers; heads of one layer"),
        ({"transformer_layer_config": {**CONFIG, "clip": 1}}, "not understood for LlamaForCausalLM .*: clip"),
        ({"architectures": ["Medusa"]}, r"architectures is \['Medusa'\]; a head of speculators_model_type"),
        ({"auto_map": {"": "head.Other"}}, "auto_map is .*, which names code in the checkpoint: none is ever"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; a head is served where it is False or absent"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is .*; a head is served where it is None",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; supported are compressed-tensors, fp8"),
        ({"fc_bias": True}, "keys that are not understood for speculators_model_type eagle3 .*: fc_bias"),
        ({"speculators_config": [1]}, r"speculators_config is \[1\]; it must be an object with proposal_methods"),
        (asking(algorithm="eagle"), "speculators_model_type is 'eagle3', and algorithm in speculators_config 'eagle'"),
        (asking(tree=1), "speculators_config has keys that are not understood: tree"),
        (asking(proposal_methods=None), "proposal_methods is None; it must be a list of objects"),
        (asking(proposal_methods=[]), r"proposal_methods is \[\]; it must be a list of objects"),
        (asking(default_proposal_method="sample"), "default_proposal_method is 'sample', and 0 of proposal_methods"),
        (
            asking(default_proposal_method="static_tree", proposal_methods=[{"proposal_type": "static_tree"}]),
            "default_proposal_method is 'static_tree', and 1 of proposal_methods are of this type; one of type greedy",
        ),
        (asking(proposal_methods=[GREEDY, GREEDY]), "and 2 of proposal_methods are of this type"),
        (asking(proposal_methods=[{**GREEDY, "width": 2}]), "greedy has keys that are not understood: width"),
        (
            asking(proposal_methods=[{**GREEDY, "verifier_accept_k": 5}]),
            "verifier_accept_k is 5: it asks that tokens be kept which are not the model's",
        ),
    ],
)
def test_what_is_not_served_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_wrapped3(tmp_path, TENSORS3, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layernorms": True}, "layernorms is true; only false is served: it is not documented"),
        ({"fusion_bias": 2}, "fusion_bias is 2; it must be true or false"),
        ({"fusion_bias": True}, "has no tensor fusion_fc.bias"),
        ({"transformer_layer_architecture": "Mixtral"}, "is 'Mixtral'; LlamaDecoderLayer is served"),
        ({"draft_vocab_size": KNOWN}, "not understood for speculators_model_type eagle .*: draft_vocab_size"),
    ],
)
def test_of_the_first_kind_too(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_wrapped(tmp_path, eagle_heads.random_head(), **changes)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


def test_tensors_are_called_as_the_file_calls_them(tmp_path: Path) -> None:
    tensors = eagle_heads.random_head()
    del tensors["layers.0.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor transformer.self_attn.o_proj.weight"):
        opened(write_wrapped(tmp_path / "1", tensors))
    tensors3 = dict(TENSORS3)
    del tensors3["midlayer.hidden_norm.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor layers.0.hidden_norm.weight"):
        opened(write_wrapped3(tmp_path / "3", tensors3))
    twice = {**in_wrapped_names(eagle_heads.random_head()), "fc.weight": tensors["fc.weight"]}
    with pytest.raises(CheckpointError, match="has a tensor twice, under two of its possible names"):
        opened(write_head(tmp_path / "twice", twice, **{**dict.fromkeys(CONFIG), **wrapped("eagle")}))
