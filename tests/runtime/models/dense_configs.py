"""Configurations of dense decoders for tests: written out field by field, or read from what `config.json` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.models.bamba import BambaConfig
from runahead.runtime.models.dense_decoder import DenseConfig
from runahead.runtime.models.expert_decoder import ExpertsConfig
from runahead.runtime.models.gemma2 import Gemma2Config
from runahead.runtime.models.gemma3 import Gemma3Config
from runahead.runtime.models.granite import GraniteConfig
from runahead.runtime.models.granite_hybrid import GraniteHybridConfig
from runahead.runtime.models.llama import LlamaConfig
from runahead.runtime.models.nemotron_h import NemotronHConfig
from runahead.runtime.models.olmo2 import Olmo2Config
from runahead.runtime.models.phi3 import Phi3Config
from runahead.runtime.models.qwen3 import Qwen3Config
from runahead.runtime.models.qwen3_moe import Qwen3MoeConfig
from runahead.runtime.models.qwen3_next import Qwen3NextConfig
from runahead.runtime.models.read_config import parse_config
from runahead.runtime.models.smollm3 import SmolLM3Config

_KINDS: Final[Mapping[str, type[DenseConfig]]] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen3ForCausalLM": Qwen3Config,
    "GraniteForCausalLM": GraniteConfig,
    "SmolLM3ForCausalLM": SmolLM3Config,
    "Olmo2ForCausalLM": Olmo2Config,
    "Phi3ForCausalLM": Phi3Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3Config,
    "MixtralForCausalLM": ExpertsConfig,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "BambaForCausalLM": BambaConfig,
    "GraniteMoeHybridForCausalLM": GraniteHybridConfig,
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "NemotronHForCausalLM": NemotronHConfig,
    "Qwen3_5ForCausalLM": Qwen3NextConfig,
    "Qwen3_5MoeForCausalLM": Qwen3NextConfig,
}


def dense_config(architecture: str, **fields: Any) -> DenseConfig:
    """A configuration of the architecture's own kind."""
    return _KINDS.get(architecture, DenseConfig)(architecture=architecture, **fields)


def parse_dense(raw: Mapping[str, Any]) -> DenseConfig:
    """What `config.json` says, of an architecture whose decoder is dense."""
    config = parse_config(raw, ())
    assert isinstance(config, DenseConfig)
    return config
