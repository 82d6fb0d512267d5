"""Models that two ranks have between them on GPUs, by name, with the bundled model's tokens. Of sizes whose parts the
exact kernels take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.gpu.small_checkpoints import with_tokenizer
from tests.parity.upcycled import BUNDLED, upcycled

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 4096, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip
_NEMOTRON_H: Final[dict[str, Any]] = {
    **_SHAPE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*EM-", "intermediate_size": 256, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 8,
    "mamba_head_dim": 32, "n_groups": 4, "ssm_state_size": 32, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_QWEN3_NEXT: Final[dict[str, Any]] = {
    **_SHAPE, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 256,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
# Without tensors: they are drawn at random where the model is loaded.
DRAWN: Final = {"mamba-2": _NEMOTRON_H, "gated-delta-net": _QWEN3_NEXT}
NAMES: Final = ("dense", "experts", *DRAWN)


def saved(name: str, folder: Path) -> dict[str, Any]:
    """Settings that serve the model, whose files are in the folder, which is empty, or are bundled."""
    if name in DRAWN:
        (folder / "config.json").write_text(json.dumps(DRAWN[name]), encoding="utf-8")
        return {
            "model": str(with_tokenizer(folder)),
            "load_format": "dummy",
            "prefix_cache": True,
            "state_snapshot_blocks": 16,
        }
    return {"model": str(BUNDLED if name == "dense" else upcycled(folder)), "prefix_cache": False}
