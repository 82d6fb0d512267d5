"""Small random checkpoints, made by transformers, which is also the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.runtime.models.grouped_experts import GLM4_MOE, GLM4_MOE_TWO_SHARED, NEMOTRON_H_EXPERTS
from tests.runtime.models.mimo import MiMoConfig

# Of a whole prompt `transformers` computes the delta rule in chunks, and is off by up to 6e-4 what it computes token by
# token. The latter is the oracle.
for module in (qwen3_next, qwen3_5, qwen3_5_moe):
    setattr(module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule)  # noqa: B010

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # logits far enough apart for greedy tokens to mean something
}
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.09375,
    "logits_scaling": 1.75,
    "rms_norm_eps": 0.5,  # so large that it counts
}
GRANITE_BIASED = {"residual_multiplier": 1.5, "attention_bias": True, "mlp_bias": True}
SMOLLM3_WINDOWS = {
    "no_rope_layer_interval": 2,
    "use_sliding_window": True,
    "sliding_window": 21,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
# Of 16 numbers of a head 12 are rotated. No length is beyond the original one.
PHI3_LONGROPE = {
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
        "attention_factor": 1.25,
    },
}
GEMMA3 = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 19, "sliding_window_pattern": 2}
# Bounds so low that they count.
GEMMA2 = {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 19,
    "attn_logit_softcapping": 2.5,
    "final_logit_softcapping": 4.0,
}
GEMMA2_UNBOUND = {"attn_logit_softcapping": 3.5, "final_logit_softcapping": None, "attention_bias": True}
GEMMA3_TYPES = {
    "layer_types": [FULL, SLIDING, FULL],
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
IDS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}  # in a small vocabulary
MIXTRAL = {**IDS, "num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {**IDS, "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16}
BAMBA = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
# An odd number of heads, two groups of B and C, one key-value head, steps that are clamped, biases everywhere.
BAMBA_GROUPS = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_expand": 3,
    "mamba_proj_bias": True,
    "time_step_limit": [0.05, 1.5],
    "attention_bias": True,
    "mlp_bias": True,
}
RECURRENT = "linear_attention"
GRANITE_HYBRID = {
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "shared_intermediate_size": 56,
}
GRANITE_HYBRID_ROTATED = {
    "num_hidden_layers": 4,
    "layer_types": [RECURRENT, FULL, FULL, RECURRENT],
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "attention_bias": True,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "num_key_value_heads": 1,
}
# A norm over a head whose numbers are all near zero makes much of the last digits: the epsilon bounds how much.
QWEN3_NEXT = {
    "rms_norm_eps": 0.01,
    "layer_types": [RECURRENT, FULL, RECURRENT],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 20,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
# No layer types but a pattern, heads alike, layers with experts and without, half of a head rotated, biases.
QWEN3_NEXT_ODD = {
    "num_hidden_layers": 4,
    "layer_types": None,
    "full_attention_interval": 3,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 3,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
QWEN3_5 = {key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and "moe" not in key}
QWEN3_5_ODD = {
    "num_hidden_layers": 4,
    "layer_types": [RECURRENT, FULL, FULL, RECURRENT],
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "num_hidden_layers": 5,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 0.2,  # so large that it counts
    "layer_norm_epsilon": 0.01,
}
# An odd number of heads, one key-value head, a mixer behind a mixer, biases, and a pattern in place of a list.
NEMOTRON_H_PATTERN = {
    "layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "head_dim": 24,
    "mamba_num_heads": 3,
    "n_groups": 1,
    "conv_kernel": 3,
    "use_bias": True,
    "use_conv_bias": False,
    "mlp_bias": True,
}
ODD_HEADS = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint: its configuration, the dtype it is stored in and how it is cut in shards.

    written: keys of config.json that are changed once it is saved.
    """

    name: str
    config: type[PreTrainedConfig]
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"
    written: dict[str, Any] = field(default_factory=dict)


AS_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

CASES = (
    Case("llama", LlamaConfig),
    Case("llama_tied_biased", LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    Case("llama3_rope", LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    Case(
        "llama_linear_rope", LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}
    ),
    Case("llama_deep_sums", LlamaConfig, {"hidden_size": 128, "intermediate_size": 1200, "head_dim": 48}),
    Case("llama_bfloat16_sharded", LlamaConfig, {}, torch.bfloat16, "40KB"),
    Case("qwen2", Qwen2Config, {"rms_norm_eps": 1e-5}),
    Case("qwen2_windows", Qwen2Config, {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    Case("qwen2_float16_tied", Qwen2Config, {"tie_word_embeddings": True}, torch.float16),
    Case("qwen3_wide_heads", Qwen3Config, {"head_dim": 40, "tie_word_embeddings": True}),
    Case("qwen3_biased_grouped", Qwen3Config, {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 1}),
    Case("mistral_window", MistralConfig, {"sliding_window": 23}, shard_size="60KB"),
    Case(
        "qwen2_layer_types",
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 19, "layer_types": [FULL, SLIDING, FULL]},
    ),
    Case(
        "qwen3_layer_types",
        Qwen3Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 17, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    # transformers serves a Mistral checkpoint that names its layers' types as a Ministral one, and saves it as such.
    Case(
        "mistral_layer_types",
        MinistralConfig,
        {"head_dim": 16, "sliding_window": 23, "layer_types": [SLIDING, FULL, SLIDING]},
        written=AS_MISTRAL,
    ),
    Case("mistral_full", MistralConfig, {"sliding_window": None, "head_dim": 32, "num_key_value_heads": 4}),
    Case(
        "ministral",
        MinistralConfig,
        {**ODD_HEADS, "head_dim": 24, "sliding_window": 23, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    Case("granite", GraniteConfig, {**GRANITE, **ODD_HEADS}),
    Case("granite_biased", GraniteConfig, {**GRANITE, **GRANITE_BIASED}),
    Case("smollm3", SmolLM3Config, {**IDS, "no_rope_layers": [1, 0, 1], "num_key_value_heads": 1}),
    Case("smollm3_windows", SmolLM3Config, {**IDS, **SMOLLM3_WINDOWS}),
    Case("olmo2", Olmo2Config, {**IDS, "attention_bias": True, "initializer_range": 0.4}),
    Case("olmo2_odd_heads", Olmo2Config, {**IDS, **ODD_HEADS, "rms_norm_eps": 1e-6}),
    Case("phi3", Phi3Config, {**IDS, "sliding_window": 25, "num_key_value_heads": 1}),
    Case("phi3_longrope_short", Phi3Config, {**IDS, **PHI3_LONGROPE}),
    Case("gemma2", Gemma2Config, {**IDS, **GEMMA2}),
    Case("gemma2_odd_heads", Gemma2Config, {**IDS, **GEMMA2, **ODD_HEADS, **GEMMA2_UNBOUND}),
    Case("gemma3", Gemma3TextConfig, {**IDS, **GEMMA3}),
    Case("gemma3_odd_heads", Gemma3TextConfig, {**IDS, **GEMMA3, **ODD_HEADS, **GEMMA3_TYPES}),
    Case("mimo", MiMoConfig, {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    Case("qwen3_yarn", Qwen3Config, {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    Case("mixtral", MixtralConfig, {**MIXTRAL, **ODD_HEADS}),
    Case("mixtral_window", MixtralConfig, {**MIXTRAL, "sliding_window": 23, "num_experts_per_tok": 1}),
    Case("qwen3_moe", Qwen3MoeConfig, {**QWEN3_MOE, **ODD_HEADS, "head_dim": 40, "norm_topk_prob": True}),
    Case(
        "qwen3_moe_dense_between",
        Qwen3MoeConfig,
        {**QWEN3_MOE, "num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2, "attention_bias": True},
    ),
    Case(
        "qwen3_moe_bfloat16_sharded",
        Qwen3MoeConfig,
        {**QWEN3_MOE, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 19},
        torch.bfloat16,
        "60KB",
        {"num_experts": 11},  # beside `num_local_experts`, which transformers 5 writes
    ),
    Case("bamba", BambaConfig, {**IDS, **BAMBA}),
    Case("bamba_groups", BambaConfig, {**IDS, **BAMBA, **BAMBA_GROUPS}),
    Case("granite_hybrid", GraniteMoeHybridConfig, {**IDS, **GRANITE, **GRANITE_HYBRID}),
    Case(
        "granite_hybrid_without_experts",
        GraniteMoeHybridConfig,
        {**IDS, **GRANITE, **GRANITE_HYBRID, **GRANITE_HYBRID_ROTATED},
        written={"layer_types": ["mamba", "attention", "attention", "mamba"], "normalization_function": "rmsnorm"},
    ),
    Case(
        "granite_hybrid_bfloat16_all_recurrent",
        GraniteMoeHybridConfig,
        {**IDS, **GRANITE_HYBRID, "layer_types": None, "tie_word_embeddings": True},
        torch.bfloat16,
        "60KB",
        {"layer_types": None, "position_embedding_type": "nope", "use_cache": False},
    ),
    Case("qwen3_next", Qwen3NextConfig, {**IDS, **QWEN3_NEXT}),
    Case(
        "qwen3_next_odd_heads",
        Qwen3NextConfig,
        {**IDS, **QWEN3_NEXT, **ODD_HEADS, **QWEN3_NEXT_ODD},
        shard_size="60KB",
    ),
    Case("qwen3_5", Qwen3_5TextConfig, {**IDS, **QWEN3_5, **ODD_HEADS, **QWEN3_5_ODD, "tie_word_embeddings": True}),
    Case("qwen3_5_moe", Qwen3_5MoeTextConfig, {**IDS, **QWEN3_NEXT}),
    Case("nemotron_h", NemotronHConfig, {**IDS, **NEMOTRON_H}),
    Case(
        "nemotron_h_pattern",
        NemotronHConfig,
        {**IDS, **NEMOTRON_H, **ODD_HEADS, **NEMOTRON_H_PATTERN},
        shard_size="60KB",
        written={"layers_block_type": None, "hybrid_override_pattern": "-*MM"},
    ),
    Case("glm4_moe", Glm4MoeConfig, {**IDS, **GLM4_MOE, **ODD_HEADS}),
    Case(
        "glm4_moe_bfloat16_two_shared",
        Glm4MoeConfig,
        {**IDS, **GLM4_MOE, **GLM4_MOE_TWO_SHARED},
        torch.bfloat16,
        "60KB",
    ),
    Case("nemotron_h_experts", NemotronHConfig, {**IDS, **NEMOTRON_H, **ODD_HEADS, **NEMOTRON_H_EXPERTS}),
    Case("llama_yarn_all_keys", LlamaConfig, {"rope_parameters": {**YARN_ROPE, **YARN_KEYS}}),
)


def save(case: Case, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write the checkpoint. Returns transformers' model of it in float32, read back from the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.config(**{**BASE, **case.changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, where a forgotten one would not be missed
                parameter.normal_(std=0.3)
            elif name.endswith(("mamba.D", "mixer.D", ".A_log")):  # the same for every head, or a row of numbers
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros, and as large as what it is added to
                buffer.normal_(std=0.3)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.shard_size)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **case.written}))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
