"""Rotary frequencies of a model, as a table by position."""

from __future__ import annotations

import math

import torch

from runahead.runtime.kernels.layers import RopeTable
from runahead.runtime.models.config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, positions: int, device: torch.device) -> RopeTable:
    """cos and sin of every position below `positions`.

    Angles are float32, as the models were trained with; cos and sin are taken in float64 and rounded, so that the
    table's bits do not depend on the number of threads.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * _frequencies(config)[None, :]
    angles = angles.double()
    return RopeTable(angles.cos().float().to(device), angles.sin().float().to(device))


def _frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim // 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
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
