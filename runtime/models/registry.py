"""The architectures that are served, by the name that `architectures` of config.json gives."""

from __future__ import annotations

from typing import Any, Final

from runahead.runtime.models.architecture import Architecture
from runahead.runtime.models.gemma3 import GEMMA3
from runahead.runtime.models.granite import GRANITE
from runahead.runtime.models.llama import LLAMA
from runahead.runtime.models.ministral import MINISTRAL
from runahead.runtime.models.mistral import MISTRAL
from runahead.runtime.models.olmo2 import OLMO2
from runahead.runtime.models.phi3 import PHI3
from runahead.runtime.models.qwen2 import QWEN2
from runahead.runtime.models.qwen3 import QWEN3
from runahead.runtime.models.smollm3 import SMOLLM3

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
)
ARCHITECTURES: Final = {found.name: found for found in _SERVED}
