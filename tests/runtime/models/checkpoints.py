"""Small random checkpoints, made by transformers, which is also the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


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


FULL, SLIDING = "full_attention", "sliding_attention"
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
)


def save(case: Case, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write the checkpoint. Returns transformers' model of it in float32, read back from the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.config(**{**BASE, **case.changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, where a forgotten one would not be missed
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.shard_size)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **case.written}))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
