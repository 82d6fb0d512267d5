"""The supported architectures by their name in `architectures` of config.json."""

from __future__ import annotations

from typing import Any, Final

from runahead.runtime.models.architecture import Architecture
from runahead.runtime.models.families.bamba import BAMBA
from runahead.runtime.models.families.dense import LLAMA, MINISTRAL, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from runahead.runtime.models.families.gemma import GEMMA2, GEMMA3
from runahead.runtime.models.families.granite import GRANITE, GRANITE_HYBRID
from runahead.runtime.models.families.mimo import MIMO
from runahead.runtime.models.families.moe import GLM4_MOE, MIXTRAL, QWEN3_MOE
from runahead.runtime.models.families.nemotron_h import NEMOTRON_H
from runahead.runtime.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from runahead.runtime.models.families.qwen3_next import QWEN3_NEXT

_SERVED: Final[tuple[Architecture[Any], ...]] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    MINISTRAL,
    GRANITE,
    SMOLLM3,
    OLMO2,
    PHI3,
    GEMMA3,
    MIMO,
    MIXTRAL,
    QWEN3_MOE,
    BAMBA,
    GRANITE_HYBRID,
    QWEN3_NEXT,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_5_MOE,
    GEMMA2,
    GLM4_MOE,
)
ARCHITECTURES: Final = {found.name: found for found in _SERVED}

# Requested but unsupported: layers that no kernel here computes.
NOT_SERVED: Final = {
    "GptOssForCausalLM": "gpt-oss keeps its experts in MXFP4 and gives each head of its attention a sink",
}
