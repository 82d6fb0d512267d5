"""Report at start how many of a model's products were measured on this GPU, and how many use a default."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer, Linear
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, EPILOGUES, GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.gemm.tuning import measured_gpu, measured_tiling, rows_in_table
from runahead.runtime.kernels.triton.gpu.capability import current_gpu
from runahead.runtime.kernels.triton.moe.layer import scored_by


class LayerProduct(NamedTuple):
    """A product of a decode launch: rows and columns of the weights, and what follows."""

    outputs: int
    depth: int
    epilogue: int


def tiling_counts(
    layers: Sequence[Layer],
    lm_head: torch.Tensor,
    buckets: Sequence[int],
    *,
    divided: bool = False,
) -> dict[str, object]:
    """Facts for the log. measured, default: products of decode launches, counted for each number of rows that has a
    separate tiling, which `measured_tilings.json` has or lacks. measured_on: the GPU of that table.

    lm_head: [vocab, hidden]. buckets: numbers of rows that graphs are captured for. divided: the layers are a rank's.
    """
    gpu = current_gpu()
    asked = tilings_asked_for(layers, lm_head, buckets, divided=divided)
    found = [measured_tiling(*product, lm_head.element_size()) for product in asked]
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
    *,
    divided: bool = False,
) -> set[tuple[int, int, int, str]]:
    """Return the tilings that decode launches need: outputs, depth, columns, epilogue. divided: the layers are a
    rank's, whose partial sums are stored."""
    inner = {one._replace(epilogue=STORE) if divided and one.epilogue == ADD else one for one in products_in(layers)}
    head = _product(Linear(lm_head, None), STORE)
    asked = itertools.product((*inner, head), {rows_in_table(rows) for rows in buckets})
    return {(one.outputs, one.depth, columns, EPILOGUES[one.epilogue]) for one, columns in asked}


def products_in(layers: Sequence[Layer]) -> Iterator[LayerProduct]:
    """Yield the products of all layers in turn. Products of experts, the shared one included, are left out:
    `moe/tuning.py` has their tilings. The router's is included."""
    for layer in layers:
        mixer, dense = layer.mixer, layer.feed_forward
        if isinstance(mixer, Attention):
            yield _product(mixer.qkv, STORE)
            if mixer.gate is not None:
                yield _product(mixer.gate, STORE)
            yield _product(mixer.o, ADD if mixer.post_norm is None else STORE)
        elif mixer is not None:
            yield from (_product(mixer.proj, STORE), _product(mixer.out, ADD))
        if isinstance(dense, Experts):
            yield _of_router(dense)
        elif isinstance(dense, Dense):
            yield _product(dense.gate_up, GATED)
            yield _product(dense.down, ADD if dense.post_norm is None else STORE)
        elif dense is not None:
            yield from (_product(dense.up, SQUARED), _product(dense.down, ADD))


def _of_router(experts: Experts) -> LayerProduct:
    return LayerProduct(scored_by(experts), experts.router.weight.shape[1], STORE)


def _product(linear: Linear, epilogue: int) -> LayerProduct:
    outputs, depth = linear.weight.shape
    return LayerProduct(outputs, depth, epilogue)
