"""What config.json may say, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.kernels.layers import Attention, Dense
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.read_config import load_config
from runahead.runtime.models.rope import RopeScaling
from runahead.runtime.models.weights import described
from tests.runtime.models.dense_configs import parse_dense

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def parse(**changes: Any) -> DenseConfig:
    return parse_dense({**RAW, **changes})


def write(folder: Path, name: str, raw: object) -> None:
    (folder / name).write_text(json.dumps(raw), encoding="utf-8")


def test_what_is_left_out_takes_the_architecture_s_defaults() -> None:
    config = parse()
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope_theta == 10000.0
    assert config.rope_scaling == RopeScaling()
    assert config.windows == (0, 0, 0)
    assert isinstance(config, DenseConfig)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert config.bos_token_id is None
    assert config.dtype is torch.float32


def test_kv_heads_left_out_are_as_many_as_query_heads() -> None:
    assert parse(num_key_value_heads=None).num_kv_heads == 4


def biases_and_norms(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
    """Of the last layer: a bias of queries, keys and values, of the attention's output, of the feed-forward, norms."""
    layer = described(config).layers[-1]
    mixer, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention) and isinstance(feed_forward, Dense)
    assert (mixer.q_norm is None) == (mixer.k_norm is None)
    assert (feed_forward.gate_up.bias is None) == (feed_forward.down.bias is None)
    has_norms = mixer.q_norm is not None
    return mixer.qkv.bias is not None, mixer.o.bias is not None, feed_forward.down.bias is not None, has_norms


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (True, True, True, False)),
        ("Qwen2ForCausalLM", (True, False, False, False)),
        ("Qwen3ForCausalLM", (True, True, False, True)),
        ("MistralForCausalLM", (False, False, False, False)),
    ],
)
def test_biases_and_norms_follow_the_architecture(architecture: str, expected: tuple[bool, ...]) -> None:
    assert biases_and_norms(parse(architectures=[architecture], attention_bias=True, mlp_bias=True)) == expected


def test_qwen2_has_biases_unasked_and_qwen3_has_none() -> None:
    assert biases_and_norms(parse(architectures=["Qwen2ForCausalLM"])) == (True, False, False, False)
    assert biases_and_norms(parse(architectures=["Qwen3ForCausalLM"])) == (False, False, False, True)


def test_rope_is_read_in_the_old_and_in_the_new_spelling() -> None:
    llama3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    old = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling) == (5e5, llama3)
    linear = parse(rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 2})
    assert (linear.rope_theta, linear.rope_scaling) == (1e6, RopeScaling("linear", 2.0))
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_windows_follow_the_architecture_s_own_switches() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 1}
    assert parse(**mistral, sliding_window=9).windows == (9, 9, 9)
    assert parse(**mistral, sliding_window=None).windows == (0, 0, 0)
    assert parse(**qwen).windows == (0, 0, 0)
    assert parse(**qwen, use_sliding_window=True).windows == (0, 9, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse(**qwen, use_sliding_window=True, layer_types=kinds).windows == (9, 0, 9)


def test_end_tokens_of_both_files_are_taken_together(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {**RAW, "eos_token_id": 7, "bos_token_id": 1, "torch_dtype": "bfloat16"})
    assert load_config(open_checkpoint(tmp_path)).eos_token_ids == (7,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [9, 7, 3]})
    config = load_config(open_checkpoint(tmp_path))
    assert config.eos_token_ids == (3, 7, 9)
    assert config.bos_token_id == 1
    assert config.dtype is torch.bfloat16


def test_an_end_token_that_the_tokenizer_s_configuration_alone_names_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {**RAW, "eos_token_id": 7})
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 5, "content": "<|im_end|>", "special": True}]})
    for named, expected in (
        ("<|im_end|>", (5, 7)),
        ({"content": "<|im_end|>"}, (5, 7)),
        ("<unknown>", (7,)),
        (None, (7,)),
    ):
        write(tmp_path, "tokenizer_config.json", {"eos_token": named})
        assert load_config(open_checkpoint(tmp_path)).eos_token_ids == expected
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    for token_id in (7, RAW["vocab_size"], -1):
        write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": token_id, "content": "<|im_end|>"}]})
        assert load_config(open_checkpoint(tmp_path)).eos_token_ids == (7,), "it is named twice, or never drawn"
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    assert load_config(open_checkpoint(tmp_path)).eos_token_ids == (7,), "the front end refuses it"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]; supported are Llama"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": ["GptOssForCausalLM"]}, "which is not served: gpt-oss keeps its experts in MXFP4 and gives"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config is 'hqq'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling has rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor is None; it must be a list"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor has 7 numbers; it must have 8",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is .*one flat object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate is 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1}, "rope_theta is 1.0; with .*'yarn'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            r"high_freq_factor \(4.0\) must be above low_freq_factor \(4.0\)",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000 are supported"),
        ({"hidden_size": 1 << 31}, "hidden_size is 2147483648; it must be at most 2147483647"),
        ({"hidden_size": 10**400}, r"hidden_size is 10+\.\.\.; it must be an integer"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 10+\.\.\.; it must be a number above 0"),
        ({"vocab_size": "160"}, "vocab_size is '160'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"head_dim": 15}, "head_dim must be even, and is 15"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8, "layer_types": []},
            r"layer_types is \[\]",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"bos_token_id": 1 << 31}, "bos_token_id is 2147483648"),
    ],
    ids=str,
)
def test_a_value_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(**changes)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_config(open_checkpoint(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(open_checkpoint(tmp_path))


def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", RAW)
    write(tmp_path, "generation_config.json", {"eos_token_id": [1, "2"]})
    with pytest.raises(CheckpointError, match=r"eos_token_id is \[1, '2'\]"):
        load_config(open_checkpoint(tmp_path))
