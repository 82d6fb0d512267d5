"""What `config.json` says of layers with recurrent states is read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import DeltaShape, Mamba2Shape
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.blocks.mamba2 import Mamba2Config
from runahead.runtime.models.families.qwen3_next import Qwen3NextConfig
from tests.runtime.models.checkpoints import FULL, SLIDING
from tests.runtime.models.dense_configs import parse_dense
from tests.runtime.models.public_configs import PUBLIC
from tests.runtime.models.test_config_keys import (
    BAMBA,
    CLASSES,
    GRANITE_HYBRID,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    needed,
    parse,
)


def recurrent_of(config: DenseConfig) -> tuple[object, ...]:
    """What says how a model's states are computed."""
    if isinstance(config, Qwen3NextConfig):
        return config.recurrent, config.delta, config.shared_size, config.rotated
    assert isinstance(config, Mamba2Config)
    return config.recurrent, config.mamba, config.conv_bias, config.proj_bias, config.dt_limits


def recurrent_of_theirs(config: Any) -> tuple[object, ...]:
    """The same as the classes of transformers have it."""
    if config.model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        sizes = (config.linear_num_key_heads, config.linear_key_head_dim, config.linear_num_value_heads)
        return (
            tuple(kind == "linear_attention" for kind in config.layer_types),
            DeltaShape(*sizes, config.linear_value_head_dim, config.linear_conv_kernel_dim),
            getattr(config, "shared_expert_intermediate_size", 0),
            int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        )
    recurrent = tuple(kind in ("linear_attention", "mamba") for kind in config.layers_block_type)
    if config.model_type == "nemotron_h":
        heads = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups)
        shape = Mamba2Shape(*heads, config.ssm_state_size, config.conv_kernel)
        return recurrent, shape, config.use_conv_bias, config.use_bias, (config.time_step_min, math.inf)
    return (
        recurrent,
        Mamba2Shape(
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_d_conv,
        ),
        config.mamba_conv_bias,
        config.mamba_proj_bias,
        tuple(config.time_step_limit),
    )


@pytest.mark.parametrize(
    "name",
    [
        "Bamba 9B",
        "Granite 4.0 H Tiny",
        "Qwen3-Next 80B-A3B",
        "Nemotron-H 8B",
        "Nemotron 3 Nano 30B-A3B",
        "Qwen3.5 27B",
        "Qwen3.5 35B-A3B",
    ],
)
def test_a_public_checkpoint_has_the_states_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]), encoding="utf-8")
    assert recurrent_of(parse_dense(PUBLIC[name])) == recurrent_of_theirs(
        AutoConfig.from_pretrained(tmp_path).get_text_config()
    )


@pytest.mark.parametrize("architecture", [BAMBA, GRANITE_HYBRID, QWEN3_NEXT, NEMOTRON_H, QWEN3_5, QWEN3_5_MOE])
def test_what_is_left_out_counts_as_transformers_counts_it(architecture: str) -> None:
    given: dict[str, Any] = {"vocab_size": 160, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 30}
    given |= {"num_attention_heads": 32, **needed(architecture, 30)}
    ours = parse_dense({**given, "architectures": [architecture]})
    assert recurrent_of(ours) == recurrent_of_theirs(CLASSES[architecture](**given))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (BAMBA, {"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1.0; BambaForCausalLM has 0.5"),
        (BAMBA, {"attn_layer_indices": [3]}, r"attn_layer_indices is \[3\]; it must be a list of layers, from 0 to 2"),
        (
            BAMBA,
            {"mamba_d_head": 3},
            r"mamba_n_heads \(128\) times mamba_d_head \(3\) must be mamba_expand times hidden",
        ),
        (BAMBA, {"mamba_n_groups": 3}, r"mamba_n_heads \(128\) must be a multiple of mamba_n_groups \(3\)"),
        (BAMBA, {"mamba_d_conv": 1}, "mamba_d_conv is 1; it must be an integer of at least 2"),
        (BAMBA, {"time_step_limit": [2.0, 1.0]}, r"time_step_limit is \[2.0, 1.0\]; it must be two numbers from 0 on"),
        (BAMBA, {"time_step_limit": 1.0}, "time_step_limit is 1.0; it must be two numbers"),
        (BAMBA, {"layer_types": [FULL] * 3}, "not understood for BambaForCausalLM .*: layer_types"),
        (
            GRANITE_HYBRID,
            {"layer_types": ["mamba"]},
            r"layer_types is \['mamba'\]; it must name mamba or linear_attention or attention or full_attention for",
        ),
        (GRANITE_HYBRID, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        (
            GRANITE_HYBRID,
            {"position_embedding_type": "alibi"},
            "position_embedding_type is 'alibi'; it must be rope, or",
        ),
        (
            GRANITE_HYBRID,
            {"normalization_function": "layernorm"},
            "normalization_function is 'layernorm'; only 'rmsnorm'",
        ),
        (
            QWEN3_NEXT,
            {"layer_types": [SLIDING] * 3},
            "layer_types is .*; it must name linear_attention or full_attention",
        ),
        (
            QWEN3_NEXT,
            {"use_sliding_window": True},
            "use_sliding_window is True, and Qwen3NextForCausalLM attends to all",
        ),
        (
            QWEN3_NEXT,
            {"linear_num_value_heads": 9},
            r"linear_num_value_heads \(9\) must be a multiple of linear_num_key",
        ),
        (NEMOTRON_H, {"layers_block_type": None}, "hybrid_override_pattern is None; it must have a letter of M, "),
        (
            NEMOTRON_H,
            {"layers_block_type": None, "hybrid_override_pattern": "MXE"},
            r"it must have a letter of M, \*, - and E for each layer",
        ),
        (NEMOTRON_H, {"moe_latent_size": 64}, "moe_latent_size is 64; only None is supported for NemotronH"),
        (NEMOTRON_H, {"n_group": 3}, "n_group is 3, and there are 8 experts; groups must be alike"),
        (NEMOTRON_H, {"layers_block_type": ["mamba"] * 2}, "num_hidden_layers is 3, and hybrid_.* has 2 layers"),
        (
            NEMOTRON_H,
            {"layers_block_type": "M-*"},
            r"layers_block_type is 'M-\*'; it must name mamba, linear_attention",
        ),
        (NEMOTRON_H, {"hybrid_override_pattern": "MM*"}, r"hybrid_override_pattern is 'MM\*', and layers_block_type"),
        (NEMOTRON_H, {"attention_head_dim": 64, "head_dim": 32}, "head_dim is 32, and attention_head_dim 64"),
        (NEMOTRON_H, {"n_groups": 3}, r"mamba_num_heads \(128\) must be a multiple of n_groups \(3\)"),
        (NEMOTRON_H, {"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\]; only \[0, Infinity\]"),
        (NEMOTRON_H, {"tie_word_embeddings": True}, "tie_word_embeddings is True; only False is supported"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; only 'relu2' is supported"),
        (NEMOTRON_H, {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu'; only 'silu' is supported"),
        (NEMOTRON_H, {"sliding_window": 9}, "sliding_window is 9; only None is supported"),
        (NEMOTRON_H, {"auto_map": {"AutoModel": "modeling_other.Other"}}, "auto_map names 'modeling_other.Other'"),
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate is False; only true is supported"),
        (
            QWEN3_5,
            {"mlp_only_layers": [1]},
            r"mlp_only_layers is \[1\]; the layers of Qwen3_5ForCausalLM are all alike",
        ),
        (QWEN3_5, {"num_experts": 8}, "not understood for Qwen3_5ForCausalLM .*: num_experts"),
        (QWEN3_NEXT, {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; it must be a list of layers, from 0 to 2"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(architecture, **changes)
