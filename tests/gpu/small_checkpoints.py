"""Small random hybrids in a folder, with the bundled model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch

from runahead.runtime import models

_BUNDLED: Final = Path(models.__path__[0]) / "bundled"
_GRANITE: Final[dict[str, Any]] = {
    "vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "position_embedding_type": "nope", "mamba_n_heads": 4,
    "mamba_d_head": 32, "mamba_expand": 1, "mamba_d_state": 32, "mamba_n_groups": 1, "num_local_experts": 5,
    "num_experts_per_tok": 2, "intermediate_size": 64, "shared_intermediate_size": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
# Gated delta nets, gated attention, experts beside one that every token gets by a share. It has no tensors: they are
# drawn at random where it is loaded.
_QWEN3_NEXT: Final[dict[str, Any]] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


def save_granite_hybrid(folder: Path) -> Path:
    """Mamba-2, attention and experts. Its weights are so far apart that logits mean something."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    torch.manual_seed(0)
    network = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**_GRANITE))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.2)
    network.bfloat16().save_pretrained(folder)
    return with_tokenizer(folder)


def save_qwen3_next(folder: Path) -> Path:
    """To be loaded with random weights (`load_format`)."""
    (folder / "config.json").write_text(json.dumps(_QWEN3_NEXT), encoding="utf-8")
    return with_tokenizer(folder)


def with_tokenizer(folder: Path) -> Path:
    """The folder, into which the bundled model's tokenizer is copied."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUNDLED / name, folder / name)
    return folder
