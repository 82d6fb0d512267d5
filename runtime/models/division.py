"""Which models can be divided among tensor-parallel ranks."""

from __future__ import annotations

from typing import assert_never

from runahead.runtime.kernels.layers import Attention, Dense, Experts, FeedForward, Ungated
from runahead.runtime.kernels.share import Share, ShareError
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.weights import described


def why_not_divided(config: ModelConfig, ranks: int) -> str:
    """Why this number of ranks can't have the model between them, as a sentence; empty where they can. Every rank's
    part has the same shapes, so that the first one's stands for all."""
    layers = described(config).layers
    if any(layer.mixer is not None and not isinstance(layer.mixer, Attention) for layer in layers):
        return f"{config.architecture} keeps recurrent states, which are not divided among ranks yet"
    if whole := next(filter(None, (_undivided(layer.feed_forward) for layer in layers)), ""):
        return f"{config.architecture} has {whole}, which are not divided among ranks yet"
    try:
        part_of(config, ranks)
    except ShareError as error:
        return str(error)
    return ""


def _undivided(feed_forward: FeedForward | None) -> str:
    """Name a feed-forward that can't be divided; empty for any other."""
    match feed_forward:
        case None | Dense():
            return ""
        case Ungated():
            return "feed-forwards without gates"
        case Experts():
            return "experts"
    assert_never(feed_forward)


def part_of(config: ModelConfig, ranks: int) -> ModelWeights:
    """The first rank's part of the model, described as by `described`."""
    return described(config, Share(0, ranks))
