"""Describes a model's kinds of layers, for clients and for estimates of host work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from runahead.runtime.kernels.layers import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    Layer,
    Mamba2,
    Mixer,
    Ungated,
)
from runahead.runtime.wire.messages import ExpertCounts, LayerKind

_MIXERS: Final[Mapping[type[Mixer], str]] = {Attention: "attention", Mamba2: "mamba2", GatedDelta: "gated_delta"}
_FEED_FORWARDS: Final[Mapping[type[FeedForward], str]] = {Dense: "dense", Ungated: "ungated", Experts: "experts"}


def layer_kinds(layers: Sequence[Layer]) -> tuple[LayerKind, ...]:
    """Group equal layers, in order of first occurrence. Their weights may be descriptions
    (`runahead.runtime.models.weights.described`).
    """
    kinds = Counter(map(_kind, layers))
    return tuple(LayerKind(count, *kind) for kind, count in kinds.items())


def _kind(layer: Layer) -> tuple[str, int, str, ExpertCounts | None]:
    """Return the fields of a `LayerKind` after its count."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    window = mixer.window if isinstance(mixer, Attention) else 0
    experts = None
    if isinstance(feed_forward, Experts):
        experts = ExpertCounts(feed_forward.count, feed_forward.chosen, 0 if feed_forward.shared is None else 1)
    first = "" if mixer is None else _MIXERS[type(mixer)]
    return first, window, "" if feed_forward is None else _FEED_FORWARDS[type(feed_forward)], experts
