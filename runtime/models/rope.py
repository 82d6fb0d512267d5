"""Rotary frequencies of a model, as a table by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.layers import RopeTable


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    kind: default, linear or llama3. factor: linear and llama3. The other three: llama3 alone.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model's attentions rotate queries and keys. head_dim: 0 in a model that rotates nothing."""

    head_dim: int
    theta: float
    scaling: RopeScaling


def rope_table(rope: Rope, positions: int, device: torch.device) -> RopeTable:
    """cos and sin of every position below `positions`.

    Angles are float32, as the models were trained with; cos and sin are taken in float64 and rounded, so that the
    table's bits do not depend on the number of threads.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(rope)[None, :]
    angles = angles.double()
    return RopeTable(angles.cos().float().to(device), angles.sin().float().to(device))


def _frequencies(rope: Rope) -> torch.Tensor:
    """float32 [head_dim // 2]."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between blended.

    Source: the reference code of Llama 3.1, `apply_scaling`.
    """
    turns = scaling.original_positions * frequencies / (2 * math.pi)  # over the original context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1.0 - share) * frequencies / scaling.factor + share * frequencies
