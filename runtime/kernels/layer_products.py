"""Count the products of layers, equal ones among them, and idle experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from runahead.runtime.kernels.layers import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    Fuse,
    Layer,
    Linear,
    Mixer,
    SharedExpert,
)
from runahead.runtime.kernels.quantized_weight import Kind, form_of


def products_of(part: Layer | Mixer | FeedForward | SharedExpert | Fuse) -> list[Linear]:
    """Return every product of a layer or of a part of one, in the order of its fields, and of each expert."""
    found: list[Linear] = []
    for field in fields(part):
        held = getattr(part, field.name)
        found += [item for item in (held if isinstance(held, tuple) else (held,)) if isinstance(item, Linear)]
        found += products_of(held) if isinstance(held, Mixer | FeedForward | SharedExpert) else []
    return found


def kinds_that_stay(layers: Sequence[Layer], device: str) -> frozenset[Kind]:
    """Return the kinds of matrices that may stay quantized. device: the type of it. On a GPU, with experts or recurrent
    layers INT4 products cost more than INT4 would save."""
    if device == "cpu":
        return frozenset(("fp8", "int8", "int4"))
    dense = all(isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, Dense) for layer in layers)
    return frozenset(("fp8", "int4") if dense else ("fp8",))


def layers_to_warm_up(layers: Sequence[Layer]) -> int:
    """Return how many of the first layers contain every kind of layer, with all product sizes and matrix forms."""
    kinds = [
        (
            type(layer.mixer),
            type(layer.feed_forward),
            *((linear.weight.shape, form_of(linear.quantized)) for linear in products_of(layer)),
        )
        for layer in layers
    ]
    return 1 + max(map(kinds.index, set(kinds)), default=-1)


def idle_in(layers: Sequence[Layer]) -> int:
    """Numbers of the layers' experts that a token does not choose, so that its step reads none of them."""
    return sum(layer.feed_forward.idle for layer in layers if isinstance(layer.feed_forward, Experts))
