"""Models whose experts are chosen by groups and by a correction: what makes small ones, and files of public ones."""

from __future__ import annotations

from typing import Any, Final

# Three groups of four, and a correction; half of a head is rotated; the first layer is dense.
GLM4_MOE = {
    "head_dim": 24,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
# Two shared experts in one, no dense layer and no norms of heads; shares are left as they are.
GLM4_MOE_TWO_SHARED = {
    "head_dim": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "n_routed_experts": 10,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "partial_rotary_factor": 0.25,
}
NEMOTRON_H_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "head_dim": 24,
    "mamba_num_heads": 3,
    "n_groups": 1,
    "mlp_bias": True,
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 5,
    "topk_group": 3,
    "routed_scaling_factor": 1.5,
}
GLM45_AIR: Final[dict[str, Any]] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GLM45: Final[dict[str, Any]] = {
    **GLM45_AIR, "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
