"""Whether a GPU's kernels are the exact ones, by which no row's bits depend on the rows beside it: where that can be,
and where it is known to cost little.

`measured_exact.json` says what it costs: by GPU, by model as `shape_key` calls it, by rows of a launch, how long a
decode step takes with the exact kernels, in parts of what it takes with the fastest. `python -m benchmarks.tune.exact`
writes it. The choice is not measured at a start: two starts alike must choose the same. (What warm-up times, it
chooses among products with the same bits: `vendor_product`.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from runahead.runtime.kernels.layer_products import products_of
from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer, Mamba2, Mixer
from runahead.runtime.kernels.triton.tilings import takes_depth
from runahead.runtime.wire.messages import Exactness

TABLE: Final = Path(__file__).with_name("measured_exact.json")
MOST_RATIO: Final = 1.03  # where nobody has asked: a step may take 3 % longer, in every bucket
_DTYPE: Final = torch.bfloat16

Ratios = Mapping[int, float]  # by rows of a launch


def shape_key(layers: Sequence[Layer], vocab_size: int, dtype: torch.dtype) -> str:
    """What of a model decides how long its steps take, in words: of layers that are alike, one and their number."""
    kinds = Counter(map(_kind, layers))
    hidden = products_of(layers[0])[0].weight.shape[1]
    each = "; ".join(f"{count} layers of {kind}" for kind, count in kinds.items())
    return f"{each}; hidden size {hidden}, vocabulary {vocab_size}, {_name(dtype)}"


def _kind(layer: Layer) -> str:
    mixer, dense = layer.mixer, layer.feed_forward
    parts = [] if mixer is None else [_mixer(mixer)]
    behind = isinstance(mixer, Attention) and mixer.post_norm is not None
    if isinstance(dense, Experts):
        gates = "" if dense.activation == "silu" else " without gates"
        parts += [f"{dense.count} experts of {dense.width}{gates}, {dense.chosen} a token"]
        parts += [] if dense.shared is None else [f"a shared one of {dense.shared.width}"]
    elif isinstance(dense, Dense):
        parts += [f"feed-forward {dense.down.weight.shape[1]}"]
        behind = behind or dense.post_norm is not None
    elif dense is not None:
        parts += [f"feed-forward {dense.down.weight.shape[1]} without a gate"]
    return ", ".join([*parts, *(["norms behind"] if behind else [])])


def _mixer(mixer: Mixer) -> str:
    if isinstance(mixer, Attention):
        heads = mixer.shape
        window = f" within {mixer.window} tokens" if mixer.window else ""
        gate = "" if mixer.gate is None else ", gated"
        return f"{heads.heads} heads and {heads.kv_heads} KV heads of {heads.head_dim}{window}{gate}"
    if isinstance(mixer, Mamba2):
        shape = mixer.shape
        return f"Mamba-2 of {shape.heads} heads of {shape.head_dim} by {shape.state}, groups {shape.groups}"
    delta = mixer.shape
    values = f"{delta.value_heads} heads of {delta.value_dim}"
    return f"gated delta net of {values} and {delta.key_heads} keys of {delta.key_dim}"


def why_impossible(layers: Sequence[Layer], dtype: torch.dtype) -> str:
    """Why there are no exact kernels for a model: the end of a sentence; empty where there are."""
    if dtype != _DTYPE:
        return f"the exact kernels are for {_name(_DTYPE)}, and the model is served in {_name(dtype)}"
    depths = sorted({product.weight.shape[1] for layer in layers for product in products_of(layer)})
    odd = [depth for depth in depths if not takes_depth(depth)]
    return (
        f"tiles of the exact kernels do not divide the {odd[0]} numbers that a product of the model sums" if odd else ""
    )


def choose_exactness(asked: str, impossible: str, measured: Ratios, buckets: Sequence[int]) -> Exactness:
    """asked: on, off or auto. impossible: see `why_impossible`; never with `on`. measured: of this model on this GPU.
    buckets: numbers of rows that graphs are captured for."""
    ratios = [_ratio(measured, rows) for rows in buckets]
    known = [ratio for ratio in ratios if ratio is not None]
    largest = max(known) if len(known) == len(buckets) else None
    if asked == "on":
        return Exactness(True, "asked for", largest)
    if asked == "off":
        return Exactness(False, "asked for", largest)
    if impossible:
        return Exactness(False, impossible)
    if largest is None:
        return Exactness(False, f"what it costs is not known: {_gap(measured, ratios, buckets)}")
    limit = f"{MOST_RATIO - 1:.0%} of a decode step"
    if largest > MOST_RATIO:
        return Exactness(False, f"it costs more than {limit} in a bucket served", largest)
    return Exactness(True, f"it costs at most {limit} in every bucket served", largest)


def measured_ratios(gpu: str, key: str, table: Path = TABLE) -> dict[int, float]:
    """What was measured of a model on a GPU; empty where nothing was."""
    by_gpu: dict[str, dict[str, dict[str, float]]] = json.loads(table.read_text()) if table.exists() else {}
    return {int(rows): ratio for rows, ratio in by_gpu.get(gpu, {}).get(key, {}).items()}


def _ratio(measured: Ratios, rows: int) -> float | None:
    """A bucket that was not measured counts as the dearer one of its neighbours."""
    if rows in measured:
        return measured[rows]
    fewer, more = [one for one in measured if one < rows], [one for one in measured if one > rows]
    return max(measured[max(fewer)], measured[min(more)]) if fewer and more else None


def _gap(measured: Ratios, ratios: Sequence[float | None], buckets: Sequence[int]) -> str:
    if not measured:
        return "nobody has measured this model on this GPU"
    missing = [str(rows) for rows, ratio in zip(buckets, ratios, strict=True) if ratio is None]
    return f"nobody has measured this model on this GPU with {', '.join(missing)} rows"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
