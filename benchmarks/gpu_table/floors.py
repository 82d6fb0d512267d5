"""The fewest bytes that a decode step reads and writes: every weight once, of experts the chosen ones, the rows'
keys and values, and each row's recurrent state, read and written.

Activations, the embedding's few rows and the block tables are left out: they are small beside these. The time is the
bytes over the bandwidth that one H200 reached when it did nothing but read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from runahead.runtime.kernels.layers import Attention, Dense, Experts, Layer, Linear, Ungated
from runahead.runtime.kernels.quantized_weight import MADE_GROUP
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.memory import memory_of
from runahead.runtime.models.weights import described
from runahead.runtime.rounding import ceil_div

BANDWIDTH: Final = 4.6e12  # bytes a second


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a decode step reads. weights: of every step. kv_token: keys and values of one token in all layers.
    layers: of the model.

    roles: weights that the products of all layers read, and `head`, by the name of the product. expert: one expert's,
    and expert_layers: how many layers have some; 0 where there are none. state: of a row's recurrent state, which a
    step reads and writes. gpus: that read equal parts at the same time.
    """

    weights: int
    kv_token: int
    layers: int
    roles: Mapping[str, int]
    expert: int = 0
    expert_layers: int = 0
    state: int = 0
    gpus: int = 1

    def floor_ms(self, tokens: float, experts: float = 0.0, rows: int = 0) -> float:
        """Return a step's bandwidth bound in milliseconds. tokens: of all rows. experts: distinct ones in a layer.
        rows: of a model with states."""
        read = self.weights + self._named(experts) + self.kv_token * tokens + self._states(rows)
        return read / self.gpus / BANDWIDTH * 1e3

    def role_floor_us(self, role: str, tokens: float, experts: float = 0.0, rows: int = 0) -> float | None:
        """Return the bandwidth bound of a role's kernels in a step, in µs; None if its bytes are unknown. See
        `floor_ms`."""
        known: dict[str, Callable[[], float]] = {
            "attention": lambda: self.kv_token * tokens,
            "experts": lambda: self._named(experts),
            "states": lambda: self._states(rows),
        }
        if role in known:
            return known[role]() / self.gpus / BANDWIDTH * 1e6
        return self.roles[role] / self.gpus / BANDWIDTH * 1e6 if role in self.roles else None

    def _named(self, experts: float) -> float:
        return self.expert * self.expert_layers * experts

    def _states(self, rows: int) -> float:
        return 2 * self.state * rows


def step_bytes(
    config: ModelConfig, dtype: torch.dtype, quantize: str = "none", kv_dtype: torch.dtype | None = None
) -> StepBytes:
    """Count the bytes of a step of a model with weights and cache in `dtype`. quantize: the setting of that name, for
    the products that have a name here, and in fp8 for experts: with fp8 they have a float32 scale for each output, with
    int4 a word for each output and group. kv_dtype: of the cache, if it is another."""
    model = described(config)
    untied = 0 if config.tie_word_embeddings else model.embedding.numel()  # of which a step reads a row for each token
    kept = memory_of(model.layers).bytes_kept(1, dtype if kv_dtype is None else kv_dtype)
    roles, saved = Counter({"head": model.lm_head.numel() * dtype.itemsize}), 0
    for layer in model.layers:  # which may be alike or not, and have a mixer, a feed-forward or both
        for role, linear in _products(layer):
            plain, size = linear.weight.numel() * dtype.itemsize, _bytes_of(linear, dtype, quantize)
            roles[role] += size
            saved += plain - size
    sparse = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)]
    form = quantize if quantize == "fp8" else "none"
    sizes = {sum(_bytes_of(linear, dtype, form) for linear in (layer.gate_up[0], layer.down[0])) for layer in sparse}
    assert len(sizes) <= 1, "experts of one size"
    of_experts = sum(layer.count * (layer.gate_up[0].weight.numel() + layer.down[0].weight.numel()) for layer in sparse)
    return StepBytes(
        weights=(model.parameters - untied - of_experts) * dtype.itemsize - saved,
        kv_token=kept.block,
        layers=len(model.layers),
        roles=roles,
        expert=sum(sizes),
        expert_layers=len(sparse),
        state=kept.row,
    )


def _bytes_of(linear: Linear, dtype: torch.dtype, quantize: str) -> int:
    outputs, depth = linear.weight.shape
    if quantize == "int4":
        return outputs * (depth // 2 + torch.float32.itemsize * ceil_div(depth, MADE_GROUP))
    return outputs * (depth + torch.float32.itemsize) if quantize == "fp8" else outputs * depth * dtype.itemsize


def _products(layer: Layer) -> Iterator[tuple[str, Linear]]:
    """Yield the products that name a kernel's role, each with the name."""
    mixer, dense = layer.mixer, layer.feed_forward
    if isinstance(mixer, Attention):
        yield from (("qkv", mixer.qkv), ("o", mixer.o))
    if isinstance(dense, Dense):
        yield from (("gate_up", dense.gate_up), ("down", dense.down))
    elif isinstance(dense, Ungated):
        yield from (("gate_up", dense.up), ("down", dense.down))
