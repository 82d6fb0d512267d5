"""Models that ranks have between them on GPUs, by name, with the bundled model's tokens, up to 8 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from runahead.runtime.checkpoint import BUNDLED_HEAD
from tests.gpu.exchanges_on_gpus import RANKS
from tests.gpu.small_checkpoints import with_tokenizer
from tests.parity.upcycled import BUNDLED, upcycled

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 4096, "hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip
_LLAMA: Final[dict[str, Any]] = {
    **_SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 512,
    "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
_MIXTRAL: Final = _LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
_NEMOTRON_H: Final[dict[str, Any]] = {
    **_SHAPE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*EM-", "intermediate_size": 512, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 16,
    "mamba_head_dim": 32, "n_groups": 8, "ssm_state_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_QWEN3_NEXT: Final[dict[str, Any]] = {
    **_SHAPE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 512,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_conv_kernel_dim": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
# Without tensors: they are drawn at random where the model is loaded.
_HYBRIDS: Final = {"mamba-2": _NEMOTRON_H, "gated-delta-net": _QWEN3_NEXT}
# The bundled model, and the same with experts, can be divided by 2 alone.
DRAWN: Final = _HYBRIDS if RANKS == 2 else {"dense": _LLAMA, "experts": _MIXTRAL, **_HYBRIDS}
DRAFTED: Final = "dense with a drafter"
NAMES: Final = ("dense", DRAFTED, "experts", *_HYBRIDS)


def saved(name: str, folder: Path) -> dict[str, Any]:
    """Settings that serve the model, whose files are in the folder, which is empty, or are bundled."""
    if name == DRAFTED:
        served = saved("dense", folder)
        itself = {"drafter": "model", "draft_model": served["model"]}
        bundled = {"drafter": "eagle", "draft_model": str(BUNDLED_HEAD)}
        return {**served, **(itself if "dense" in DRAWN else bundled), "draft_tokens": 3, "draft_forced": True}
    if name in DRAWN:
        (folder / "config.json").write_text(json.dumps(DRAWN[name]), encoding="utf-8")
        states = {"prefix_cache": True, "state_snapshot_blocks": 16} if name in _HYBRIDS else {"prefix_cache": False}
        return {"model": str(with_tokenizer(folder)), "load_format": "dummy", **states}
    return {"model": str(BUNDLED if name == "dense" else upcycled(folder)), "prefix_cache": False}
