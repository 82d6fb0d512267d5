"""What kernels compute for each activation: the only place that compares an activation's name."""

from __future__ import annotations

from typing import assert_never

from runahead.runtime.kernels.layers import Activation, ExpertActivation


def is_gelu(activation: Activation) -> bool:
    """Whether a dense feed-forward's gate is GELU by its formula with tanh. False: SiLU."""
    match activation:
        case "silu":
            return False
        case "gelu_tanh":
            return True
    assert_never(activation)


def has_gate(activation: ExpertActivation) -> bool:
    """Whether an expert's first product has a gate, which is SiLU. False: it has none, and a squared ReLU."""
    match activation:
        case "silu":
            return True
        case "squared_relu":
            return False
    assert_never(activation)
