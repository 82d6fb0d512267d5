"""Norms, rotary embedding and activations by row in NumPy, and the buffers of a forward that they work in.

A decode step streams every weight through the processor's caches, so operations between products find neither code nor
data cached. NumPy runs the least code there. It also never splits an array among threads: an element's arithmetic
depends only on its column.

Buffers are made once for each number of query tokens T with all views, and used by every layer and forward, so a step
allocates almost nothing. T is padded for the products; padding is token 0 at position 0, written to the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import GELU_CUBE, GELU_SLOPE, AttentionShape, Norm, RopeTable
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.kernels.reference.linear import Products


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A `Norm` in NumPy."""

    weight: NDArray[np.float32]  # [n]
    eps: np.float32

    @staticmethod
    def of(norm: Norm) -> NormWeight:
        return NormWeight(norm.weight.float().numpy(), np.float32(norm.eps))


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The RMS norm of an array with a fixed address. Everything is float32."""

    x: NDArray[np.float32]  # [..., n]
    out: NDArray[np.float32]  # [..., n], may be x
    rows: NDArray[np.float32]  # [..., 1, n], x
    columns: NDArray[np.float32]  # [..., n, 1], x
    squares: NDArray[np.float32]  # [..., 1, 1] sums over a row
    scale: NDArray[np.float32]  # [..., 1], the same memory
    inverse: np.float32  # 1 / n

    @staticmethod
    def of(x: NDArray[np.float32], out: NDArray[np.float32]) -> RmsNorm:
        squares = np.empty((*x.shape[:-1], 1, 1), np.float32)
        return RmsNorm(
            x,
            out,
            x[..., None, :],
            x[..., :, None],
            squares,
            squares[..., 0],
            np.float32(1.0 / x.shape[-1]),
        )

    def apply(self, norm: NormWeight) -> None:
        """Compute out = x / sqrt(mean(x^2) + eps) * weight.

        Only the mean is a sum, one dot product a row; the rest is exactly rounded element by element.
        """
        scale, out = self.scale, self.out
        np.matmul(self.rows, self.columns, out=self.squares)
        np.multiply(scale, self.inverse, out=scale)
        np.add(scale, norm.eps, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(self.x, scale, out=out)
        np.multiply(out, norm.weight, out=out)


def silu_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Compute out = silu(gate) * up. All [rows, n]; out overlaps neither. For a very negative gate the exponential
    overflows, which gives the correct zero.
    """
    np.negative(gate, out=out)
    _sigmoid_mul(gate, up, out)


def gelu_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Compute out = gelu(gate) * up, with gelu(x) = x * (1 + tanh(z)) / 2 and z = sqrt(2 / pi) * (x + 0.044715 * x^3).
    All [rows, n]; out overlaps neither. (1 + tanh(z)) / 2 is the logistic function of 2 * z.

    Source: Hendrycks and Gimpel, 2016, "Gaussian Error Linear Units".
    """
    np.multiply(gate, gate, out=out)
    np.multiply(out, np.float32(GELU_CUBE), out=out)
    np.add(out, np.float32(1.0), out=out)
    np.multiply(out, gate, out=out)
    np.multiply(out, np.float32(-GELU_SLOPE), out=out)
    _sigmoid_mul(gate, up, out)


def bound(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    """Compute x = cap * tanh(x / cap) in place, any shape, and return x."""
    np.divide(x, np.float32(cap), out=x)
    np.tanh(x, out=x)
    return np.multiply(x, np.float32(cap), out=x)


def squared_relu(x: NDArray[np.float32]) -> None:
    """Compute x = max(x, 0)^2 in place, any shape. NaN stays NaN."""
    np.maximum(x, np.float32(0.0), out=x)
    np.multiply(x, x, out=x)


def logistic_mul(gate: NDArray[np.float32], x: NDArray[np.float32]) -> None:
    """Compute x *= 1 / (1 + exp(-gate)). Both [rows, n]; gate is overwritten."""
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    np.add(gate, np.float32(1.0), out=gate)
    np.divide(x, gate, out=x)


def _sigmoid_mul(gate: NDArray[np.float32], up: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Compute out = gate / (1 + exp(out)) * up."""
    np.exp(out, out=out)
    np.add(out, np.float32(1.0), out=out)
    np.divide(gate, out, out=out)
    np.multiply(out, up, out=out)


def rope_factors(table: RopeTable) -> NDArray[np.float32]:
    """Return the factors of a head's halves, for themselves and swapped: [positions, 2, 2, head_dim // 2]."""
    cos, sin = table.cos.numpy(), table.sin.numpy()
    return np.stack((np.stack((cos, cos), axis=1), np.stack((-sin, sin), axis=1)), axis=1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The in-place rotation of an array's heads at a fixed address."""

    halves: NDArray[np.float32]  # [T, heads, 2, head_dim // 2]
    swapped: NDArray[np.float32]  # the same memory, second half first
    product: NDArray[np.float32]  # of the swapped halves, the same shape
    factors: NDArray[np.float32]  # [T, 2, 2, head_dim // 2]
    cos: NDArray[np.float32]  # [T, 1, 2, head_dim // 2], of `factors`
    signed_sin: NDArray[np.float32]

    @staticmethod
    def of(halves: NDArray[np.float32]) -> Rotation:
        """Prepare a rotation. halves: [T, heads, 2, head_dim // 2]."""
        factors = np.empty((halves.shape[0], 2, 2, halves.shape[3]), np.float32)
        return Rotation(
            halves,
            halves[:, :, ::-1],
            np.empty(halves.shape, np.float32),
            factors,
            factors[:, :1],
            factors[:, 1:],
        )

    def turn_to(self, table: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Set the positions, once a forward. table: from `rope_factors`. positions: [T], clamped to the table."""
        np.take(table, positions, axis=0, out=self.factors, mode="clip")

    def apply(self) -> None:
        """Rotate. Products and sums are separate calls: each is exactly rounded."""
        np.multiply(self.swapped, self.signed_sin, out=self.product)
        np.multiply(self.halves, self.cos, out=self.halves)
        np.add(self.halves, self.product, out=self.halves)


# Floats are float32. A tensor and an array of one name share memory; `..._parts` are split for a product.


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of a batch's tokens, independent of layers."""

    tokens: int  # T
    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T] of the cache
    residual: torch.Tensor  # [T, hidden]
    residual_array: NDArray[np.float32]
    norm: RmsNorm  # from the residual to a product's input
    normed_parts: tuple[torch.Tensor, ...]  # of [T, hidden]
    residual_parts: tuple[torch.Tensor, ...]
    branch: torch.Tensor  # [T, hidden], what is summed over ranks, or normalised, before it is added to the residual
    branch_array: NDArray[np.float32]
    branch_norm: RmsNorm  # in place

    @staticmethod
    def make(tokens: int, hidden: int, products: Products) -> Buffers:
        residual, normed = torch.zeros((2, tokens, hidden)).unbind()
        branch = torch.zeros((tokens, hidden))
        return Buffers(
            tokens=tokens,
            token_ids=np.zeros(tokens, np.int64),
            positions=np.zeros(tokens, np.int64),
            slots=np.zeros(tokens, np.int64),
            residual=residual,
            residual_array=residual.numpy(),
            norm=RmsNorm.of(residual.numpy(), normed.numpy()),
            normed_parts=products.cut(normed),
            residual_parts=products.cut(residual),
            branch=branch,
            branch_array=branch.numpy(),
            branch_norm=RmsNorm.of(branch.numpy(), branch.numpy()),
        )

    def embed(self, embedding: NDArray[np.float32], shard: Shard) -> None:
        """Copy the tokens' embeddings into the residual, zeros for other ranks' tokens. embedding: [vocab / ranks,
        hidden].
        """
        count = len(embedding)
        indexes = self.token_ids - shard.rank * count
        np.take(embedding, indexes, axis=0, out=self.residual_array, mode="clip")
        if not shard.is_whole:
            self.residual_array[(indexes < 0) | (indexes >= count)] = 0.0

    def take(self, batch: ForwardBatch) -> None:
        """Set the batch's tokens, padded to T."""
        count = batch.num_tokens
        for mine, given in (
            (self.token_ids, batch.token_ids),
            (self.positions, batch.positions),
            (self.slots, batch.slot_mapping),
        ):
            mine[:count] = given.numpy()
            mine[count:] = 0


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Buffers of attention layers of one shape."""

    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim]
    heads: torch.Tensor  # [T * (heads + 2 * kv_heads), head_dim], the same memory
    k: NDArray[np.float32]  # [T, kv_heads, head_dim], of `qkv`
    v: NDArray[np.float32]
    q_norm: RmsNorm  # of every query head, in place
    k_norm: RmsNorm
    whole_q_norm: RmsNorm  # over all query heads of a token, in place
    whole_k_norm: RmsNorm
    rotation: Rotation  # of q and k, in place

    @staticmethod
    def make(tokens: int, shape: AttentionShape) -> AttentionBuffers:
        rotated, heads = shape.heads + shape.kv_heads, shape.heads + 2 * shape.kv_heads
        qkv = torch.zeros((tokens, heads * shape.head_dim))
        by_head = qkv.numpy().reshape(tokens, heads, shape.head_dim)
        q, k = by_head[:, : shape.heads], by_head[:, shape.heads : rotated]
        whole_q, whole_k = qkv.numpy()[:, : shape.q_size], qkv.numpy()[:, shape.q_size : rotated * shape.head_dim]
        return AttentionBuffers(
            qkv=qkv,
            heads=qkv.view(-1, shape.head_dim),
            k=k,
            v=by_head[:, rotated:],
            q_norm=RmsNorm.of(q, q),
            k_norm=RmsNorm.of(k, k),
            whole_q_norm=RmsNorm.of(whole_q, whole_q),
            whole_k_norm=RmsNorm.of(whole_k, whole_k),
            rotation=Rotation.of(by_head.reshape(tokens, heads, 2, -1)[:, :rotated]),
        )


@dataclass(frozen=True, slots=True)
class DenseBuffers:
    """Buffers of dense layers of one width."""

    gate_up: torch.Tensor  # [T, 2 * intermediate]
    gate: NDArray[np.float32]  # [T, intermediate]
    up: NDArray[np.float32]
    gated: NDArray[np.float32]  # [T, intermediate] silu(gate) * up
    gated_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def make(tokens: int, intermediate: int, products: Products) -> DenseBuffers:
        gate_up = torch.zeros((tokens, 2 * intermediate))
        gated = torch.zeros((tokens, intermediate))
        return DenseBuffers(
            gate_up=gate_up,
            gate=gate_up.numpy()[:, :intermediate],
            up=gate_up.numpy()[:, intermediate:],
            gated=gated.numpy(),
            gated_parts=products.cut(gated),
        )


@dataclass(frozen=True, slots=True)
class UngatedBuffers:
    """Buffers of feed-forwards without a gate, of one width. The tensor and the array share memory."""

    up: torch.Tensor  # [T, intermediate]
    up_array: NDArray[np.float32]
    up_parts: tuple[torch.Tensor, ...]

    @staticmethod
    def make(tokens: int, intermediate: int, products: Products) -> UngatedBuffers:
        up = torch.zeros((tokens, intermediate))
        return UngatedBuffers(up, up.numpy(), products.cut(up))
