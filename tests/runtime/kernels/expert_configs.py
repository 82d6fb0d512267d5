"""A small model whose experts are chosen by corrected values and by groups, of sizes that the matrix units take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runahead.runtime.models.blocks.experts import CorrectedExperts

# The first layer is dense; half of a head is rotated.
GLM4_MOE: Final[Mapping[str, Any]] = {
    "architecture": "Glm4MoeForCausalLM",
    "routed": CorrectedExperts(
        experts=12, chosen=3, size=64, renormalised=True, groups=3, chosen_groups=2, scale=2.5, shared_size=64
    ),
    "intermediate_size": 128,
    "sparse": (False, True),
    "rotated": 8,
    "attention_bias": True,
    "head_norms": True,
    "heads": 0,
}
