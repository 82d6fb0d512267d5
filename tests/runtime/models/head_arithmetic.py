"""What layers of draft heads compute, in NumPy and float64, from their definitions alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    """The RMS norm over the last dimension."""
    found: Floats = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
    return found


def gated(x: Floats, own: Mapping[str, Floats], prefix: str) -> Floats:
    """A Llama's feed-forward. prefix: of its tensors."""
    gate, up = (x @ own[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    found: Floats = (gate / (1 + np.exp(-gate)) * up) @ own[f"{prefix}down_proj.weight"].T
    return found


def attended(x: Floats, own: Mapping[str, Floats], prefix: str, heads: int, theta: float) -> Floats:
    """Causal attention of all entries, with its output product. x: [n, any], the first at position 0. prefix: of its
    tensors."""
    q, k, v = (x @ own[f"{prefix}{name}_proj.weight"].T + own.get(f"{prefix}{name}_proj.bias", 0.0) for name in "qkv")
    count, dim = len(x), q.shape[1] // heads
    q, k, v = (part.reshape(count, -1, dim) for part in (q, k, v))
    found = weighed(rotated(q, theta), rotated(k, theta), v)
    output: Floats = found.reshape(count, -1) @ own[f"{prefix}o_proj.weight"].T
    return output


def weighed(q: Floats, k: Floats, v: Floats) -> Floats:
    """Values as causal attention weighs them, [n, heads, dim]. q: [n, heads, dim]. k, v: [n, kv_heads, dim]."""
    (count, heads, dim), found = q.shape, np.empty(q.shape)
    hidden_from = np.triu(np.ones((count, count), np.bool_), 1)
    for head in range(heads):
        of_head = head // (heads // k.shape[1])
        scores = np.where(hidden_from, -np.inf, q[:, head] @ k[:, of_head].T / np.sqrt(dim))
        weights = np.exp(scores - scores.max(1, keepdims=True))
        found[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, of_head]
    return found


def rotated(x: Floats, theta: float) -> Floats:
    """x: [n, heads, dim], at positions 0 to n - 1."""
    half = x.shape[2] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
