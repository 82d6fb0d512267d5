"""Hybrid decoders with Mamba-2 layers and attention layers: keys of `config.json`, and the recurrent mixer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from runahead.runtime.checkpoint import CheckpointError
from runahead.runtime.kernels.layers import Mamba2, Mamba2Shape, Norm
from runahead.runtime.models.architecture import TensorReader, computed
from runahead.runtime.models.blocks.dense import READ_BY_DENSE, DenseConfig
from runahead.runtime.models.blocks.mixer_shards import part_of_mamba2
from runahead.runtime.models.config.keys import unread
from runahead.runtime.models.config.values import flag, number

_LIMITS: Final = "time_step_limit"
_INFINITY: Final = {"__float__": "Infinity"}  # as `transformers` writes it: JSON has no infinity
_EXPAND: Final = "mamba_expand"
# No class of `transformers` reads a window for hybrid decoders.
READ_BY_MAMBA2: Final = READ_BY_DENSE.union(
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias "
    "mamba_proj_bias time_step_limit".split()
) - {"sliding_window", "use_sliding_window", "layer_types"}
SCANS_IN_CHUNKS: Final = unread(
    "How a library cuts the recurrence, whose result is the same, and which code computes it.",
    "mamba_chunk_size use_mamba_kernels",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(DenseConfig):
    """A hybrid decoder. recurrent: by layer, whether its mixer is Mamba-2. proj_bias: of both products. dt_limits:
    bounds of the steps.
    """

    recurrent: tuple[bool, ...]
    mamba: Mamba2Shape
    conv_bias: bool
    proj_bias: bool
    dt_limits: tuple[float, float]


def read_mamba2(raw: Mapping[str, Any], recurrent: Sequence[bool]) -> dict[str, Any]:
    """Read the fields of `Mamba2Config`. Raises CheckpointError."""
    inner = number(raw, _EXPAND, int, 2) * number(raw, "hidden_size", int)
    heads = number(raw, "mamba_n_heads", int, 128)
    given = raw.get("mamba_d_head")
    head_dim = inner // heads if given in (None, "auto") else number(raw, "mamba_d_head", int)
    if head_dim * heads != inner:
        raise CheckpointError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be {_EXPAND} times hidden_size ({inner})"
        )
    groups = number(raw, "mamba_n_groups", int, 1)
    if heads % groups:
        raise CheckpointError(f"mamba_n_heads ({heads}) must be a multiple of mamba_n_groups ({groups})")
    state, window = number(raw, "mamba_d_state", int, 256), number(raw, "mamba_d_conv", int, 4, low=2)
    return {
        "recurrent": tuple(recurrent),
        "mamba": Mamba2Shape(heads, head_dim, groups, state, window),
        "conv_bias": flag(raw, "mamba_conv_bias", default=True),
        "proj_bias": flag(raw, "mamba_proj_bias"),
        "dt_limits": read_limits(raw),
    }


def read_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Read the bounds of `time_step_limit`. Raises CheckpointError."""
    given = raw.get(_LIMITS)
    if given is None:
        return 0.0, math.inf
    numbers = [math.inf if one == _INFINITY else one for one in given] if isinstance(given, list) else []
    fits = len(numbers) == 2 and all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
    if not fits or not 0 <= numbers[0] <= numbers[1]:
        raise CheckpointError(f"{_LIMITS} is {given!r}; it must be two numbers from 0 on, the lower one first")
    return float(numbers[0]), float(numbers[1])


def mamba2(config: Mamba2Config, layer: int, tensors: TensorReader, *, eps: float | None = None) -> Mamba2:
    """Build a layer's recurrent mixer, or the rank's heads of it. eps: of the inner norm; None: of the others. Raises
    ShardError.
    """
    own = f"model.layers.{layer}."
    prefix, shape, hidden = f"{own}mamba.", config.mamba, config.hidden_size
    part, channels, bias = part_of_mamba2(shape, tensors.shard), (shape.channels,), config.proj_bias
    outputs = shape.inner + shape.channels + shape.heads

    def by_head(name: str) -> torch.Tensor:
        return tensors.tensor((prefix + name,), (shape.heads,), own=part.heads)

    def by_channel(name: str, *columns: int) -> torch.Tensor:
        return tensors.tensor((prefix + name,), channels, *columns, own=part.channels)

    def by_number(name: str) -> torch.Tensor:
        own = None if part.inner is None else torch.arange(part.inner.start, part.inner.stop)
        return tensors.tensor((prefix + name,), (shape.inner,), own=own)

    return Mamba2(
        part.shape,
        norm=tensors.norm(f"{own}input_layernorm", hidden, config.rms_norm_eps),
        proj=tensors.linear((f"{prefix}in_proj",), (outputs,), hidden, bias=bias, own=part.outputs),
        conv_weight=by_channel("conv1d.weight", 1, shape.window),
        conv_bias=by_channel("conv1d.bias") if config.conv_bias else None,
        a=computed(by_head("A_log"), lambda log: -torch.exp(log)),
        d=by_head("D"),
        dt_bias=by_head("dt_bias"),
        dt_limits=config.dt_limits,
        gated_norm=Norm(by_number("norm.weight"), config.rms_norm_eps if eps is None else eps),
        out=tensors.linear((f"{prefix}out_proj",), (hidden,), shape.inner, bias=bias, inputs=part.inner),
    )
