"""Experts of the reference: who goes to whom, and the products of those who share an expert.

Host and device are one here, so that an expert is computed for as many tokens as have chosen it. What a token gets
hangs on itself alone: its scores, shares and products keep their bits among any neighbours, and its sum is taken in the
order of the experts' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import Experts, Linear, SharedExpert
from runahead.runtime.kernels.reference.buffers import Buffers
from runahead.runtime.kernels.reference.linear import Product, Products
from runahead.runtime.kernels.reference.norm import silu_mul

# Floats are float32. A tensor and an array of one name are the same memory.


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Of layers with as many experts of one width. T rows are enough for any group: a token is in a group once."""

    scores: torch.Tensor  # [T, experts]
    x: torch.Tensor  # [T, hidden] what a group reads
    gate_up: torch.Tensor  # [T, 2 * width]
    gated: torch.Tensor  # [T, width]
    y: torch.Tensor  # [T, hidden] what a group gives, or the shared expert
    shared_gate_up: torch.Tensor  # [T, 2 * width of the shared expert]
    shared_gated: torch.Tensor  # [T, width of the shared expert]

    @staticmethod
    def make(tokens: int, hidden: int, count: int, width: int, shared: int = 0) -> ExpertBuffers:
        """shared: the width of the shared expert; 0: there is none."""
        columns = (count, hidden, 2 * width, width, hidden, 2 * shared, shared)
        return ExpertBuffers(*(torch.zeros((tokens, each)) for each in columns))


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens of a forward that have chosen an expert, ascending, and the share that each gives it."""

    expert: int
    tokens: NDArray[np.intp]  # [n]
    shares: NDArray[np.float32]  # [n, 1]


def live_tokens(batch: ForwardBatch) -> NDArray[np.intp]:
    """Which query tokens are of rows that are not masked, ascending."""
    queries = np.diff(batch.query_start_loc.numpy())
    return np.flatnonzero(np.repeat(batch.seq_lens.numpy() > 0, queries))


def route(scores: NDArray[np.float32], live: NDArray[np.intp], chosen: int, renormalised: bool) -> Iterator[Group]:
    """The groups, by ascending expert. scores: [T, experts]. live: tokens that choose.

    A NaN among a token's scores is in all of its shares, so that it reaches the token's sum.
    """
    if not len(live):
        return
    mine = scores[live]
    order = np.argsort(-mine, axis=1, kind="stable")[:, :chosen]
    np.subtract(mine, mine.max(axis=1, keepdims=True), out=mine)
    np.exp(mine, out=mine)
    np.divide(mine, mine.sum(axis=1, keepdims=True), out=mine)
    shares = np.take_along_axis(mine, order, axis=1)
    if renormalised:
        total = shares[:, 0].copy()
        for place in range(1, chosen):  # one order of sums, however the array lies in memory
            total += shares[:, place]
        shares /= total[:, None]
    named = order.ravel()
    by_expert = np.argsort(named, kind="stable")
    experts, firsts = np.unique(named[by_expert], return_index=True)
    for expert, places in zip(experts.tolist(), np.split(by_expert, firsts[1:]), strict=True):
        yield Group(expert, live[places // chosen], shares.ravel()[places, None])


@dataclass(frozen=True, slots=True)
class BoundSharedExpert:
    """The products of what every token gets.

    share: [hidden, 1]. A library's product with one output does not keep its rows' bits, so that each token's is a dot
    product of its own.
    """

    gate_up: Product
    down: Product
    share: NDArray[np.float32] | None
    products: Products

    @staticmethod
    def of(weights: SharedExpert, products: Products) -> BoundSharedExpert:
        def bound(linear: Linear) -> Product:
            return products.bind(linear.weight, linear.bias)

        share = None if weights.share is None else weights.share.float().numpy()[:, None]
        return BoundSharedExpert(bound(weights.gate_up), bound(weights.down), share, products)

    def of_all(self, buffers: Buffers, own: ExpertBuffers) -> NDArray[np.float32]:
        """What it makes of the residual's norm, of every token. [T, hidden]"""
        self.gate_up.write(buffers.normed_parts, own.shared_gate_up)
        gate_up, gated, y = own.shared_gate_up.numpy(), own.shared_gated.numpy(), own.y.numpy()
        silu_mul(gate_up[:, : gated.shape[1]], gate_up[:, gated.shape[1] :], gated)
        self.down.write(self.products.cut(own.shared_gated), own.y)
        if self.share is not None:
            y /= np.exp(-np.matmul(buffers.norm.out[:, None], self.share)[:, 0]) + np.float32(1.0)
        return y


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The products of a layer."""

    router: Product
    gate_up: tuple[Product, ...]
    down: tuple[Product, ...]
    chosen: int
    renormalised: bool
    products: Products
    shared: BoundSharedExpert | None

    @staticmethod
    def of(weights: Experts, products: Products) -> BoundExperts:
        return BoundExperts(
            products.bind(weights.router.weight, weights.router.bias),
            tuple(products.bind(linear.weight, linear.bias) for linear in weights.gate_up),
            tuple(products.bind(linear.weight, linear.bias) for linear in weights.down),
            weights.chosen,
            weights.renormalised,
            products,
            None if weights.shared is None else BoundSharedExpert.of(weights.shared, products),
        )

    def add(self, buffers: Buffers, own: ExpertBuffers, live: NDArray[np.intp]) -> None:
        """To the residual, what the experts make of its norm, which has been computed."""
        self.router.write(buffers.normed_parts, own.scores)
        total = buffers.branch_array
        total[:] = 0.0
        for group in route(own.scores.numpy(), live, self.chosen, self.renormalised):
            y = self._of(group, buffers.norm.out, own)
            np.multiply(y, group.shares, out=y)
            total[group.tokens] += y
        if self.shared is not None:
            total[live] += self.shared.of_all(buffers, own)[live]
        np.add(buffers.residual_array, total, out=buffers.residual_array)

    def _of(self, group: Group, normed: NDArray[np.float32], own: ExpertBuffers) -> NDArray[np.float32]:
        """What the group's expert makes of its tokens, [n, hidden]."""
        count = len(group.tokens)
        rows = count + -count % self.products.row_multiple
        x, gate_up, gated, y = own.x[:rows], own.gate_up[:rows], own.gated[:rows], own.y[:rows]
        x.numpy()[:count] = normed[group.tokens]
        x.numpy()[count:] = 0.0
        self.gate_up[group.expert].write(self.products.cut(x), gate_up)
        width = gated.shape[1]
        silu_mul(gate_up.numpy()[:, :width], gate_up.numpy()[:, width:], gated.numpy())
        self.down[group.expert].write(self.products.cut(gated), y)
        found: NDArray[np.float32] = y.numpy()[:count]
        return found
