"""Maps activations to kernel options: the only place that compares their names."""

from __future__ import annotations

from typing import assert_never

from runahead.runtime.kernels.layers import Activation, ExpertActivation


def is_gelu_tanh(activation: Activation) -> bool:
    """Return whether a dense feed-forward's gate is GELU (tanh formula) instead of SiLU."""
    match activation:
        case "silu":
            return False
        case "gelu_tanh":
            return True
    assert_never(activation)


def has_gate(activation: ExpertActivation) -> bool:
    """Return whether an expert's first product has a SiLU gate, instead of a squared ReLU without a gate."""
    match activation:
        case "silu":
            return True
        case "squared_relu":
            return False
    assert_never(activation)
