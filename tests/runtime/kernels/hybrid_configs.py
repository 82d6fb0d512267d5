"""Small hybrid models: a layer with a recurrent state and one with attention, of sizes that the matrix units take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.kernels.layers import DeltaShape, Mamba2Shape
from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.blocks.experts import CorrectedExperts
from tests.gpu import gpu_chain

_MAMBA2: Final[Mapping[str, Any]] = {
    "recurrent": (True, False),
    "conv_bias": True,
    "proj_bias": False,
    "dt_limits": (0.0, float("inf")),
}
HYBRIDS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Groups, and a feed-forward of its own.
    "BambaForCausalLM": {**_MAMBA2, "mamba": Mamba2Shape(4, 32, 2, 16, 4), "intermediate_size": 128, "rotated": 8},
    # One group and an odd number of heads, experts and a shared one, all multipliers.
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA2,
        "mamba": Mamba2Shape(3, 64, 1, 32, 4),
        "intermediate_size": 64,
        "experts": 11,
        "chosen": 3,
        "shared_size": 64,
        "rotates_any": False,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 3.0,
    },
    # Gated attention, a shared expert by a share of its own, two heads of values to a key.
    "Qwen3NextForCausalLM": {
        "recurrent": (True, False),
        "delta": DeltaShape(3, 16, 6, 32, 4),
        "intermediate_size": 128,
        "rotated": 8,
        "experts": 11,
        "chosen": 3,
        "expert_size": 64,
        "renormalised": True,
        "sparse": (False, True),
        "shared_size": 64,
    },
}


# Layers that are a mixer or a feed-forward, none of which has a gate: one for all tokens, and experts by groups beside
# one that every token gets.
HALVED: Final[Mapping[str, Mapping[str, Any]]] = {
    "NemotronHForCausalLM": {
        **_MAMBA2,
        "num_layers": 4,
        "windows": (0, 0, 0, 0),
        "recurrent": (False, True, False, False),
        "pattern": "-M*E",
        "mamba": Mamba2Shape(4, 32, 2, 16, 4),
        "intermediate_size": 128,
        "mlp_bias": True,
        "routed": CorrectedExperts(
            experts=10, chosen=3, size=64, renormalised=True, groups=5, chosen_groups=3, scale=2.5, shared_size=64
        ),
    }
}


def hybrid(architecture: str, **changes: Any) -> DenseConfig:
    return gpu_chain.small_config(architecture=architecture, **{**{**HYBRIDS, **HALVED}[architecture], **changes})
