"""Configurations of dense decoders for tests: written out field by field, or read from what `config.json` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.models.blocks.dense import DenseConfig
from runahead.runtime.models.blocks.experts import ExpertsConfig
from runahead.runtime.models.blocks.mamba2 import Mamba2Config
from runahead.runtime.models.families.dense import SmolLM3Config
from runahead.runtime.models.families.gemma import Gemma2Config, Gemma3Config
from runahead.runtime.models.families.granite import GraniteConfig, GraniteHybridConfig
from runahead.runtime.models.families.moe import Glm4MoeConfig
from runahead.runtime.models.families.nemotron_h import NemotronHConfig
from runahead.runtime.models.families.qwen3_next import Qwen3NextConfig
from runahead.runtime.models.read_config import parse_config

_KINDS: Final[Mapping[str, type[DenseConfig]]] = {
    "GraniteForCausalLM": GraniteConfig,
    "SmolLM3ForCausalLM": SmolLM3Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3Config,
    "MixtralForCausalLM": ExpertsConfig,
    "Qwen3MoeForCausalLM": ExpertsConfig,
    "BambaForCausalLM": Mamba2Config,
    "GraniteMoeHybridForCausalLM": GraniteHybridConfig,
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "NemotronHForCausalLM": NemotronHConfig,
    "Qwen3_5ForCausalLM": Qwen3NextConfig,
    "Qwen3_5MoeForCausalLM": Qwen3NextConfig,
    "Glm4MoeForCausalLM": Glm4MoeConfig,
}


def dense_config(architecture: str, **fields: Any) -> DenseConfig:
    """A configuration of the architecture's own kind."""
    return _KINDS.get(architecture, DenseConfig)(architecture=architecture, **fields)


def parse_dense(raw: Mapping[str, Any]) -> DenseConfig:
    """What `config.json` says, of an architecture whose decoder is dense."""
    config = parse_config(raw, ())
    assert isinstance(config, DenseConfig)
    return config


def experts_of(config: DenseConfig) -> tuple[object, ...]:
    """What says how experts are chosen and how large they are."""
    if isinstance(config, Glm4MoeConfig | NemotronHConfig):
        routed = config.routed
        more = (routed.groups, routed.chosen_groups, routed.scale, routed.shared_size)
        sizes = (routed.experts, routed.chosen, routed.size, routed.renormalised)
        return (*sizes, *more, config.sparse if isinstance(config, Glm4MoeConfig) else config.pattern)
    if isinstance(config, ExpertsConfig) and config.experts:
        return config.experts, config.chosen, config.expert_size, config.renormalised
    return ()


def experts_of_theirs(config: Any) -> tuple[object, ...]:
    """The same as the classes of transformers have it."""
    if config.model_type in ("glm4_moe", "nemotron_h"):
        sizes = (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        more = (config.norm_topk_prob, config.n_group, config.topk_group, config.routed_scaling_factor)
        if config.model_type == "nemotron_h":
            return (*sizes, *more, config.moe_shared_expert_intermediate_size, config.hybrid_override_pattern)
        sparse = tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))
        return (*sizes, *more, config.n_shared_experts * config.moe_intermediate_size, sparse)
    if config.model_type not in ("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
        return ()
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    renormalised = getattr(config, "norm_topk_prob", True)
    return config.num_experts, config.num_experts_per_tok, size, renormalised
