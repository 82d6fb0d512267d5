"""Rotary frequencies of a model as a table by position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runahead.runtime.kernels.layers import RopeTable


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for long contexts.

    kind: default, linear, llama3, yarn or longrope. factor: of all but the first. low_freq_factor and high_freq_factor:
    llama3. original_positions: llama3, yarn and longrope. magnitude: multiplies cos and sin with yarn and longrope.
    beta_fast, beta_slow, truncate: yarn. short_factors, long_factors: longrope, one for each frequency; the former for
    tables of at most `original_positions`.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of attentions' queries and keys.

    head_dim: 0 in a model without rotation. rotated: rotated numbers of a head, half of them at the beginning of each
    half; None: all. Both are even.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling
    rotated: int | None = None

    def __post_init__(self) -> None:
        rotated = self.head_dim if self.rotated is None else self.rotated
        assert 0 <= rotated <= self.head_dim and rotated % 2 == self.head_dim % 2 == 0, self


def rope_table(rope: Rope, positions: int, device: torch.device) -> RopeTable:
    """Return cos and sin of every position below `positions`.

    Angles are float32, as in training; cos and sin are computed in float64 and rounded, so that the table's bits do not
    depend on threads.
    """
    frequencies = _frequencies(rope, positions)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    angles = angles.double()
    cos, sin = angles.cos() * rope.scaling.magnitude, angles.sin() * rope.scaling.magnitude
    still = rope.head_dim // 2 - len(frequencies)
    cos = torch.cat([cos, cos.new_ones((positions, still))], dim=1)
    sin = torch.cat([sin, sin.new_zeros((positions, still))], dim=1)
    return RopeTable(cos.float().to(device), sin.float().to(device))


def _frequencies(rope: Rope, positions: int) -> torch.Tensor:
    """float32 [rotated // 2]."""
    rotated = rope.head_dim if rope.rotated is None else rope.rotated
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, rope.theta, scaling)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if positions > scaling.original_positions else scaling.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Apply Llama 3.1's scaling: slow long waves by `factor`, keep short ones, blend between.

    Source: the reference code of Llama 3.1, `apply_scaling`.
    """
    turns = scaling.original_positions * frequencies / (2 * math.pi)  # over the original context
    fraction = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    fraction = fraction.clamp(0.0, 1.0)
    return (1.0 - fraction) * frequencies / scaling.factor + fraction * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Apply YaRN: like `_llama3`, but blended by a frequency's index instead of its turns.

    Source: Peng et al., 2023, "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2.
    """
    rotated = 2 * len(frequencies)

    def number_with(turns: float) -> float:
        """Return the index of the frequency with this many turns over the original context."""
        return rotated * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = number_with(scaling.beta_fast), number_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return slowed * frequencies / scaling.factor + (1.0 - slowed) * frequencies
