"""Draft heads as wide as a model and with a layer of its kind, to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from runahead.runtime.kernels.layers import Attention, Fuse, Linear
from runahead.runtime.models.architecture import HeadWeights
from runahead.runtime.models.decoder import Decoder

GUESSED: Final = 32_000  # tokens of the draft vocabulary, where a head has one: as those of EAGLE-3 are published


def heads_like(model: Decoder, matrix: Callable[[int, int], torch.Tensor]) -> dict[str, HeadWeights]:
    """Of EAGLE-1; of EAGLE-3, with a draft vocabulary and all norms that it may have; and of MiMo. None for a model
    whose layers are unlike a head's. matrix: makes one, [outputs, depth], where the model is."""
    layer, hidden, vocab = model.weights.layers[0], model.config.hidden_size, model.config.vocab_size
    mixer, feed_forward = layer.mixer, layer.feed_forward
    if not isinstance(mixer, Attention) or mixer.norm is None or feed_forward is None:
        return {}
    norm, known = mixer.norm, min(GUESSED, vocab // 2)

    def linear(outputs: int, depth: int) -> Linear:
        return Linear(matrix(outputs, depth), None)

    def head(fuse: Fuse, mixer: Attention, **more: Any) -> HeadWeights:
        return HeadWeights(fuse, mixer, feed_forward, model.weights.ropes[0], 0, hidden, **more)

    both = linear(hidden, 2 * hidden)
    own = replace(mixer, norms_span_heads=False, post_norm=None, first=1, rope=0)
    joined = replace(own, norm=None, qkv=linear(mixer.qkv.weight.shape[0], 2 * hidden), joined=True)
    after = len(model.weights.layers)
    return {
        "eagle-1": head(Fuse(both), replace(own, norm=None)),
        "eagle-3": head(
            Fuse(None, norm, norm, normed_residual=True),
            joined,
            reads=(min(2, after), after // 2, max(after - 3, 0)),
            narrow=linear(hidden, 3 * hidden),
            read_norms=(norm,) * 3,
            norm=norm,
            lm_head=matrix(known, hidden),
            targets=torch.arange(known, device=model.device),
        ),
        "mtp": head(Fuse(both, norm, norm, hidden_first=True), own, norm=norm),
    }
