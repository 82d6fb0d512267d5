"""Whether a GPU's kernels are the exact ones: no row's bits depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.layers import Attention, Dense, Layer
from runahead.runtime.kernels.triton.gemm.tuning import is_one_sum, takes_depth
from runahead.runtime.wire.messages import Exactness

_DTYPE: Final = torch.bfloat16


def why_impossible(layers: Sequence[Layer], dtype: torch.dtype) -> str:
    """Why there are no exact kernels for a model: the end of a sentence; empty where there are."""
    if dtype != _DTYPE:
        return f"the exact kernels are for {_name(_DTYPE)}, and the model is served in {_name(dtype)}"
    depths = sorted({product.weight.shape[1] for layer in layers for product in products_of(layer)})
    odd = [depth for depth in depths if not takes_depth(depth)]
    return (
        f"tiles of the exact kernels do not divide the {odd[0]} numbers that a product of the model sums" if odd else ""
    )


def costs_little(layers: Sequence[Layer]) -> bool:
    """Whether the exact kernels are about as fast in a crowd as the fastest: every layer is attention and a gated
    feed-forward, and every product has one accumulator for each output."""
    return all(
        isinstance(layer.mixer, Attention)
        and isinstance(layer.feed_forward, Dense)
        and all(is_one_sum(*product.weight.shape) for product in products_of(layer))
        for layer in layers
    )


def choose_exactness(asked: str, impossible: str, cheap: bool) -> Exactness:
    """The choice of a start, the same at every start of a model.

    asked: on, off or auto. impossible: see `why_impossible`; never with `on`. cheap: see `costs_little`.
    """
    if asked != "auto":
        return Exactness(asked == "on", "asked for")
    if impossible or not cheap:
        return Exactness(
            False,
            impossible
            or "the exact kernels cost a model with small products, experts or recurrent layers more than a tenth",
        )
    return Exactness(True, "every product of the model is large enough for one order of its sums")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
