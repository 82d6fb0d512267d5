"""What layers consist of, counted: their products, how many of them are alike, and what of their experts is idle."""

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
    """Every product of a layer or of a part of one, in the order of its fields; those of experts one by one."""
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


def layers_to_meet(layers: Sequence[Layer]) -> int:
    """How many of the first layers have between them every kind of layer there is, and every size of its products, in
    every form of their matrices."""
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
