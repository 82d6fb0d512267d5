"""FP8 keys and values by their definition, for tests of kernels that keep them."""

from __future__ import annotations

from dataclasses import replace

import torch

from runahead.runtime.kernels.layers import Attention
from runahead.runtime.models.architecture import ModelWeights

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def kept(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Bits, uint8 of the same shape, [..., kv_heads, dim]. scale: float32 [kv_heads]."""
    bounded = (numbers.float() / scale[:, None]).clamp(-LARGEST, LARGEST)
    return torch.where(numbers.isfinite(), bounded, torch.nan).to(FP8).view(torch.uint8)


def read(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of the same shape. bits: uint8 or FP8 [..., kv_heads, dim]. scale: float32 [kv_heads]."""
    return bits.view(FP8).float() * scale[:, None]


def random_scales(kv_heads: int) -> torch.Tensor:
    """float32 [2, kv_heads], none of them a power of two."""
    return torch.rand(2, kv_heads) * 0.02 + 0.003


def with_fp8_kv(weights: ModelWeights) -> ModelWeights:
    """The same model with FP8 keys and values, whose scales are 1."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, kv_scales=_ones(layer.mixer)))
        if isinstance(layer.mixer, Attention)
        else layer
        for layer in weights.layers
    )
    return replace(weights, layers=layers)


def _ones(mixer: Attention) -> torch.Tensor:
    return torch.ones((2, mixer.shape.kv_heads), device=mixer.o.weight.device)
