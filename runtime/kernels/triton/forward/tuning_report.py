"""How many of a model's products were measured on this GPU, and how many take a default: said once, at start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer, Linear
from runahead.runtime.kernels.triton.forward.decode import MAX_ROWS
from runahead.runtime.kernels.triton.gemm.gemv import ADD, EPILOGUES, GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.gemm.tuning import (
    measured_gpu,
    measured_tiling,
    rows_in_table,
    takes_depth,
    takes_products_of,
)
from runahead.runtime.kernels.triton.gpu.capability import current_gpu
from runahead.runtime.kernels.triton.moe.layer import scored_by


class LayerProduct(NamedTuple):
    """A product of a decode launch: rows and columns of the weights, what follows, whether a norm goes before it."""

    outputs: int
    depth: int
    epilogue: int
    normed: bool


def tiling_counts(
    layers: Sequence[Layer],
    lm_head: torch.Tensor,
    buckets: Sequence[int],
    exact: bool = False,
    *,
    divided: bool = False,
) -> dict[str, object]:
    """Facts for the log. measured, default: products of decode launches, counted for each number of rows that has a
    tiling of its own, which `measured_tilings.json` has or lacks. measured_on: the GPU of that table.

    lm_head: [vocab, hidden]. buckets: numbers of rows that graphs are captured for. exact: by the exact kernels.
    divided: the layers are a rank's.
    """
    gpu = current_gpu()
    asked = tilings_asked_for(layers, lm_head, buckets, exact, divided=divided)
    found = [measured_tiling(*product, exact) for product in asked]
    measured = sum(one is not None for one in found)
    return {
        "gpu": "none" if gpu is None else gpu.name,
        "compute_capability": "none" if gpu is None else ".".join(map(str, gpu.capability)),
        "measured_on": measured_gpu() or "none",
        "measured": measured,
        "default": len(found) - measured,
    }


def tilings_asked_for(
    layers: Sequence[Layer],
    lm_head: torch.Tensor,
    buckets: Sequence[int],
    exact: bool = False,
    *,
    divided: bool = False,
) -> set[tuple[int, int, int, str]]:
    """What decode launches ask `tilings` for: outputs, depth, columns (1: one row), the name of what follows. divided:
    the layers are a rank's, whose partial sums are stored."""
    inner = {one._replace(epilogue=STORE) if divided and one.epilogue == ADD else one for one in products_in(layers)}
    head = _product(Linear(lm_head, None), STORE, normed=False)
    asked: list[tuple[LayerProduct, int]] = []
    if exact:
        asked += itertools.product((*inner, head), map(rows_in_table, buckets))
    else:
        several = {rows_in_table(rows) for rows in buckets if rows > 1}
        few = {columns for columns in several if columns <= MAX_ROWS}
        has_units = lm_head.dtype == torch.bfloat16
        asked += [(product, 1) for product in (*inner, head) if 1 in buckets]
        if has_units and all(map(takes_products_of, layers)):
            asked += itertools.product(inner, few)
        # These are no vendor's products where the others are: of a few rows the head, of any number the routers.
        routers = {_of_router(layer.feed_forward) for layer in layers if isinstance(layer.feed_forward, Experts)}
        alone = [*itertools.product((head,), few), *itertools.product(routers, several)]
        asked += [(product, columns) for product, columns in alone if has_units and takes_depth(product.depth)]
    return {(one.outputs, one.depth, columns, EPILOGUES[one.epilogue]) for one, columns in asked}


def products_in(layers: Sequence[Layer]) -> Iterator[LayerProduct]:
    """Of all layers in turn, those of experts left out, which `moe/tuning.py` cuts, the shared one's among them: their
    router's is here."""
    for layer in layers:
        mixer, dense = layer.mixer, layer.feed_forward
        if isinstance(mixer, Attention):
            yield _product(mixer.qkv, STORE, True)
            if mixer.gate is not None:
                yield _product(mixer.gate, STORE, True)
            yield _product(mixer.o, ADD if mixer.post_norm is None else STORE, False)
        elif mixer is not None:
            yield from (_product(mixer.proj, STORE, True), _product(mixer.out, ADD, False))
        if isinstance(dense, Experts):
            yield _of_router(dense)
        elif isinstance(dense, Dense):
            yield _product(dense.gate_up, GATED, True)
            yield _product(dense.down, ADD if dense.post_norm is None else STORE, False)
        elif dense is not None:
            yield from (_product(dense.up, SQUARED, True), _product(dense.down, ADD, False))


def _of_router(experts: Experts) -> LayerProduct:
    return LayerProduct(scored_by(experts), experts.router.weight.shape[1], STORE, True)


def _product(linear: Linear, epilogue: int, normed: bool) -> LayerProduct:
    outputs, depth = linear.weight.shape
    return LayerProduct(outputs, depth, epilogue, normed)
