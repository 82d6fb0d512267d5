"""Which models can be divided among tensor-parallel ranks."""

from __future__ import annotations

from runahead.runtime.kernels.share import Share, ShareError
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.weights import described


def why_not_divided(config: ModelConfig, ranks: int) -> str:
    """Why this number of ranks can't have the model between them, as a sentence; empty where they can. Every rank's
    part has the same shapes, so that the first one's stands for all."""
    try:
        part_of(config, ranks)
    except ShareError as error:
        return str(error)
    return ""


def part_of(config: ModelConfig, ranks: int) -> ModelWeights:
    """The first rank's part of the model, described as by `described`."""
    return described(config, Share(0, ranks))
