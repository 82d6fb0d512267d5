"""Which kinds of layers a model has, in words for clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from runahead.runtime.kernels.layers import Attention, Experts, GatedDelta, Layer, Mamba2, Mixer
from runahead.runtime.wire.messages import ExpertCounts, LayerKind

_MIXERS: Final[Mapping[type[Mixer], str]] = {Attention: "attention", Mamba2: "mamba2", GatedDelta: "gated_delta"}


def layer_kinds(layers: Sequence[Layer]) -> tuple[LayerKind, ...]:
    """Layers that are alike together, in the order in which the first of each comes. Their weights may be described
    alone (`runahead.runtime.models.weights.described`)."""
    kinds = Counter(map(_kind, layers))
    return tuple(LayerKind(count, *kind) for kind, count in kinds.items())


def _kind(layer: Layer) -> tuple[str, int, str, ExpertCounts | None]:
    """The fields of a `LayerKind` after its count."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    name, window = _MIXERS[type(mixer)], mixer.window if isinstance(mixer, Attention) else 0
    if isinstance(feed_forward, Experts):
        shared = 0 if feed_forward.shared is None else 1
        return name, window, "experts", ExpertCounts(feed_forward.count, feed_forward.chosen, shared)
    return name, window, "dense", None
