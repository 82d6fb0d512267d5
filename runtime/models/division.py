"""Checks whether a model can be divided among tensor-parallel ranks."""

from __future__ import annotations

from runahead.runtime.kernels.share import Share, ShareError
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.weights import described


def why_not_divided(config: ModelConfig, ranks: int) -> str:
    """Say why this number of ranks can't share the model, empty if they can. All ranks' parts have the same shapes, so
    the first one is representative.
    """
    try:
        part_of(config, ranks)
    except ShareError as error:
        return str(error)
    return ""


def part_of(config: ModelConfig, ranks: int) -> ModelWeights:
    """Describe the first rank's part of the model (`described`)."""
    return described(config, Share(0, ranks))
