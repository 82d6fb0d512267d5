"""`config.json` of well-known public checkpoints, as they are published. Layers are as many as there, shapes too."""

from __future__ import annotations

from typing import Any, Final

from tests.runtime.models.grouped_experts import GLM45, GLM45_AIR
from tests.runtime.models.public_gemma3 import GEMMA3, GEMMA3_4B

_LLAMA2: Final[dict[str, Any]] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_LLAMA3: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
_LLAMA31: Final[dict[str, Any]] = {
    **_LLAMA3, "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
_LLAMA32: Final[dict[str, Any]] = {
    **_LLAMA31, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN25: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_MISTRAL: Final[dict[str, Any]] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_MISTRAL_V3: Final[dict[str, Any]] = {
    **_MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768,
    "transformers_version": "4.42.0.dev0",
}  # fmt: skip
_SMOL: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
_TINY: Final[dict[str, Any]] = {
    **_LLAMA2, "attention_bias": False, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.35.0",
}  # fmt: skip
_LLAMA1: Final[dict[str, Any]] = {
    **{key: value for key, value in _LLAMA2.items() if key not in ("num_key_value_heads", "pretraining_tp")},
    "max_position_embeddings": 2048, "max_sequence_length": 2048, "pad_token_id": 0,
}  # fmt: skip
# By transformers 5: one object for rope, the type of every layer, no torch_dtype.
_QWEN25_SAVED_AGAIN: Final[dict[str, Any]] = {
    **{key: value for key, value in _QWEN25.items() if key not in ("rope_theta", "torch_dtype")},
    "dtype": "bfloat16", "layer_types": ["full_attention"] * 24, "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "sliding_window": None,
    "transformers_version": "5.17.0",
}  # fmt: skip

_GRANITE33: Final[dict[str, Any]] = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": True,
    "vocab_size": 49159,
}  # fmt: skip
_SMOLLM3: Final[dict[str, Any]] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.53.0.dev0", "use_cache": False,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip

_OLMO2: Final[dict[str, Any]] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0", "use_cache": False, "vocab_size": 100352,
}  # fmt: skip
_PHI3: Final[dict[str, Any]] = {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
_PHI4_MINI: Final[dict[str, Any]] = {
    **_PHI3, "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1,
    "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
    "num_key_value_heads": 8, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [4.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},  # 4: not its own
    "sliding_window": 262144, "tie_word_embeddings": True, "transformers_version": "4.45.0", "vocab_size": 200064,
}  # fmt: skip
_PHI4: Final[dict[str, Any]] = {
    **{key: value for key, value in _PHI3.items() if key != "auto_map"},
    "bos_token_id": 100257, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
    "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384, "pad_token_id": 100257, "rope_theta": 250000, "sliding_window": None,
    "transformers_version": "4.47.0", "vocab_size": 100352,
}  # fmt: skip
_MIXTRAL: Final[dict[str, Any]] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
_QWEN3_MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_MIMO: Final[dict[str, Any]] = {
    "architectures": ["MiMoForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig", "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 32768, "max_window_layers": 36,
    "model_type": "mimo", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151680,
}  # fmt: skip
# Layers and shapes are the published ones; the keys are those that the class in transformers had when it came.
_BAMBA: Final[dict[str, Any]] = {
    "architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
    "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "bamba", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": True, "vocab_size": 128256,
}  # fmt: skip
# The same of Granite 4.0 H Tiny.
_GRANITE_HYBRID: Final[dict[str, Any]] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup", "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
    "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
    "num_local_experts": 64, "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.0, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
# The same of Qwen3-Next.
_QWEN3_NEXT: Final[dict[str, Any]] = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

# Nemotron-H 8B, of whose file the shapes and the pattern are quoted where it is described.
_NEMOTRON_H: Final[dict[str, Any]] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0,
    "hidden_size": 4096, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02, "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05,
    "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip

_GEMMA2: Final[dict[str, Any]] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
# Qwen3.5 35B-A3B and 27B, text and pictures. Shapes are the published ones; the keys are those of the class.
_QWEN3_5_MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(40)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
_QWEN3_5: Final[dict[str, Any]] = {
    **_QWEN3_5_MOE, "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "text_config": {
        **{
            key: value
            for key, value in _QWEN3_5_MOE["text_config"].items()
            if "expert" not in key and "moe" not in key and "router" not in key
        },
        "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48, "model_type": "qwen3_5_text",
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)],
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
}  # fmt: skip

# The same as for Nemotron-H 8B, of Nemotron 3 Nano 30B-A3B.
_NEMOTRON3_NANO: Final[dict[str, Any]] = {
    **{key: value for key, value in _NEMOTRON_H.items() if key != "attention_head_dim"},
    "chunk_size": 128, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
    "mamba_num_heads": 64, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_experts_per_tok": 6, "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "topk_group": 1, "transformers_version": "4.55.4",
}  # fmt: skip

PUBLIC: Final[dict[str, dict[str, Any]]] = {
    "Llama 1 7B": _LLAMA1,
    "Llama 2 7B": _LLAMA2,
    "Llama 3 8B": _LLAMA3,
    "Llama 3.1 8B Instruct": _LLAMA31,
    "Llama 3.2 1B": _LLAMA32,
    "Llama 3.2 1B by unsloth": {
        **_LLAMA32, "_attn_implementation_autoset": True, "pad_token_id": 128004, "unsloth_fixed": True,
        "unsloth_version": "2025.3.3",
    },
    "DeepSeek R1 Distill Llama 8B": {**_LLAMA31, "eos_token_id": 128001, "transformers_version": "4.43.0.dev0"},
    "DeepSeek Coder 1.3B": {
        **_LLAMA2, "hidden_size": 2048, "intermediate_size": 5504, "max_position_embeddings": 16384,
        "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "vocab_size": 32256,
    },
    "Falcon3 1B": {
        **_LLAMA3, "activation": "swiglu", "head_dim": 256, "hidden_size": 2048, "intermediate_size": 8192,
        "mlp_bias": False, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1000042, "vocab_size": 131072,
    },
    "TinyLlama 1.1B": _TINY,
    "SmolLM2 135M": _SMOL,
    "Qwen2.5 0.5B": _QWEN25,
    "Qwen2.5 0.5B saved again": _QWEN25_SAVED_AGAIN,
    "Qwen2 0.5B": {key: value for key, value in _QWEN25.items() if key != "use_mrope"},
    "DeepSeek R1 Distill Qwen 1.5B": {
        **_QWEN25, "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072,
        "max_window_layers": 21, "num_attention_heads": 12, "num_hidden_layers": 28, "rope_theta": 10000,
        "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "Qwen3 0.6B": _QWEN3,
    "MiMo 7B": _MIMO,
    "Mistral 7B v0.1": _MISTRAL,
    "Mistral 7B Instruct v0.2": {**_MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None},
    "Mistral 7B v0.3": _MISTRAL_V3,
    "Mistral Nemo": {**_MISTRAL_V3, "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40},
    "Qwen3 0.6B stretched as its page says": {
        **_QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "Granite 3.3 2B": _GRANITE33,
    "SmolLM3 3B": _SMOLLM3,
    "OLMo 2 7B": _OLMO2,
    "Phi-3 mini 4k": _PHI3,
    "Phi-4": _PHI4,
    "Phi-4 mini": _PHI4_MINI,
    "Gemma 3 1B": GEMMA3,
    "Gemma 3 4B": GEMMA3_4B,
    "Mixtral 8x7B": _MIXTRAL,
    "Mixtral 8x22B": {
        **_MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536,
        "num_attention_heads": 48, "num_hidden_layers": 56, "vocab_size": 32768,
    },
    "Qwen3 30B-A3B": _QWEN3_MOE,
    "Bamba 9B": _BAMBA,
    "Granite 4.0 H Tiny": _GRANITE_HYBRID,
    "Qwen3-Next 80B-A3B": _QWEN3_NEXT,
    "Nemotron-H 8B": _NEMOTRON_H,
    "Nemotron 3 Nano 30B-A3B": _NEMOTRON3_NANO,
    "Gemma 2 2B": _GEMMA2,
    "GLM-4.5 Air": GLM45_AIR,
    "GLM-4.5": GLM45,
    "Qwen3.5 27B": _QWEN3_5,
    "Qwen3.5 35B-A3B": _QWEN3_5_MOE,
    "Qwen3 235B-A22B": {
        **_QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94,
        "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94,
    },
}  # fmt: skip

# What `to_dict` of transformers 4 adds to the keys of a class, each with its default.
OF_EVERY_CLASS: Final[dict[str, Any]] = {
    "_name_or_path": "", "_attn_implementation_autoset": False, "add_cross_attention": False, "architectures": None,
    "bad_words_ids": None, "begin_suppress_tokens": None, "bos_token_id": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "eos_token_id": None,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "pad_token_id": None,
    "prefix": None, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False,
    "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False,
    "transformers_version": "4.48.0", "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
