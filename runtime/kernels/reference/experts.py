"""The reference's experts: routing, and the products of tokens grouped by expert.

An expert is computed only for the tokens that chose it. A token's result depends on that token alone: scores, weights
and products keep their bits among any neighbors, and its sum is taken in the order of experts' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.runtime.kernels.activations import has_gate
from runahead.runtime.kernels.choice import LEAST_SUM, Choice
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.layers import ExpertActivation, Experts, Linear, SharedExpert
from runahead.runtime.kernels.reference.linear import Product, Products
from runahead.runtime.kernels.reference.ops import Buffers, silu_mul, squared_relu

# Floats are float32. A tensor and an array of one name share memory.


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Buffers of layers with the same number and width of experts. T rows suffice for any group, because a token is in
    a group once. The buffers of gates and ups have no columns if experts have no gates.
    """

    scores: torch.Tensor  # [T, experts]
    x: torch.Tensor  # [T, hidden] what a group reads
    gate_up: torch.Tensor  # [T, 2 * width]
    gated: torch.Tensor  # [T, width]
    y: torch.Tensor  # [T, hidden] what a group gives, or the shared expert
    shared_gate_up: torch.Tensor  # [T, 2 * width of the shared expert]
    shared_gated: torch.Tensor  # [T, width of the shared expert]

    @staticmethod
    def make(
        tokens: int, hidden: int, count: int, width: int, shared: int = 0, activation: ExpertActivation = "silu"
    ) -> ExpertBuffers:
        """Make buffers. shared: the width of the shared expert; 0: none."""
        both = 2 if has_gate(activation) else 0
        columns = (count, hidden, both * width, width, hidden, both * shared, shared)
        return ExpertBuffers(*(torch.zeros((tokens, each)) for each in columns))


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens that chose an expert, ascending, with their weights for it."""

    expert: int
    tokens: NDArray[np.intp]  # [n]
    routing_weights: NDArray[np.float32]  # [n, 1]


def live_tokens(batch: ForwardBatch) -> NDArray[np.intp]:
    """Return the query tokens of unmasked rows, ascending."""
    queries = np.diff(batch.query_start_loc.numpy())
    return np.flatnonzero(np.repeat(batch.seq_lens.numpy() > 0, queries))


def route(scores: NDArray[np.float32], live: NDArray[np.intp], choice: Choice) -> Iterator[Group]:
    """Yield the groups by ascending expert. scores: [T, experts]. live: tokens to route.

    A NaN among a token's scores is in all of its weights, so it reaches the token's sum.
    """
    if not len(live):
        return
    order, routing_weights = chosen_experts(scores[live], choice)
    chosen, named = choice.chosen, order.ravel()
    by_expert = np.argsort(named, kind="stable")
    experts, firsts = np.unique(named[by_expert], return_index=True)
    for expert, indexes in zip(experts.tolist(), np.split(by_expert, firsts[1:]), strict=True):
        yield Group(expert, live[indexes // chosen], routing_weights.ravel()[indexes, None])


def chosen_experts(scores: NDArray[np.float32], choice: Choice) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return each token's experts, the best one first, and their weights: [n, chosen] both. scores: [n, experts],
    overwritten by experts' values.
    """
    order = _highest(scores, choice.chosen) if choice.by_score else None
    values = _softmax(scores) if choice.scoring == "softmax" else _logistic(scores)
    if order is None:
        order = _highest(_chosen_by(values, choice), choice.chosen)
    routing_weights = np.take_along_axis(values, order, axis=1)
    if choice.renormalised:
        total = routing_weights[:, 0].copy()
        for index in range(1, choice.chosen):  # a fixed order of sums, whatever the array's layout
            total += routing_weights[:, index]
        if choice.scoring == "logistic":
            total += np.float32(LEAST_SUM)
        routing_weights /= total[:, None]
    if choice.scale != 1.0:
        routing_weights *= np.float32(choice.scale)
    return order, routing_weights


def _highest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the indexes of each row's highest values, highest first, ties by index. [n, count]"""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the softmax in place."""
    np.subtract(scores, scores.max(axis=1, keepdims=True), out=scores)
    np.exp(scores, out=scores)
    np.divide(scores, scores.sum(axis=1, keepdims=True), out=scores)
    return scores


def _logistic(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the logistic function in place; a row with a NaN becomes NaN."""
    scores[np.isnan(scores).any(axis=1)] = np.nan
    np.exp(np.negative(scores, out=scores), out=scores)
    scores += np.float32(1.0)
    np.reciprocal(scores, out=scores)
    return scores


def _chosen_by(values: NDArray[np.float32], choice: Choice) -> NDArray[np.float32]:
    """Return the values for the choice, [n, experts]: corrected, and below all others for groups that are not
    chosen.
    """
    if choice.correction is not None:
        values = values + choice.correction.numpy()
    if not choice.limits_groups:
        return values
    by_group = values.reshape(len(values), choice.groups, -1)
    of_groups = np.partition(by_group, -2, axis=2)[:, :, -2:].sum(axis=2)
    best = np.zeros(of_groups.shape, bool)
    np.put_along_axis(best, _highest(of_groups, choice.chosen_groups), True, axis=1)
    return np.where(best[:, :, None], by_group, np.float32(-np.inf)).reshape(values.shape)


@dataclass(frozen=True, slots=True)
class FirstProduct:
    """An expert's first product and its activation."""

    product: Product
    activation: ExpertActivation

    def write(self, x: tuple[torch.Tensor, ...], both: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the hidden activations.
        x: [n, hidden], split for a product. both: [n, 2 * width], for the gate and up, or no columns.
        out: [n, width].
        """
        made = out.numpy()
        if not has_gate(self.activation):
            self.product.write(x, out)
            squared_relu(made)
            return
        self.product.write(x, both)
        width, halves = made.shape[1], both.numpy()
        silu_mul(halves[:, :width], halves[:, width:], made)


@dataclass(frozen=True, slots=True)
class BoundSharedExpert:
    """The products of a shared expert.

    gate: [hidden, 1]. A library's product with one output is not row-invariant, so each token's is a separate dot
    product.
    """

    first: FirstProduct
    down: Product
    gate: NDArray[np.float32] | None
    products: Products

    @staticmethod
    def of(weights: SharedExpert, activation: ExpertActivation, products: Products) -> BoundSharedExpert:
        def bound(linear: Linear) -> Product:
            return products.bind(linear.weight, linear.bias)

        gate = None if weights.gate is None else weights.gate.float().numpy()[:, None]
        first = FirstProduct(bound(weights.gate_up), activation)
        return BoundSharedExpert(first, bound(weights.down), gate, products)

    def of_all(self, buffers: Buffers, own: ExpertBuffers) -> NDArray[np.float32]:
        """Return the shared expert's output for the residual's norm, every token. [T, hidden]"""
        y = own.y.numpy()
        self.first.write(buffers.normed_parts, own.shared_gate_up, own.shared_gated)
        self.down.write(self.products.cut(own.shared_gated), own.y)
        if self.gate is not None:
            y /= np.exp(-np.matmul(buffers.norm.out[:, None], self.gate)[:, 0]) + np.float32(1.0)
        return y


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The products of a layer's experts."""

    router: Product
    first: tuple[FirstProduct, ...]
    down: tuple[Product, ...]
    choice: Choice
    products: Products
    shared: BoundSharedExpert | None

    @staticmethod
    def of(weights: Experts, products: Products) -> BoundExperts:
        kind, shared = weights.activation, weights.shared
        return BoundExperts(
            products.bind(weights.router.weight, weights.router.bias),
            tuple(FirstProduct(products.bind(linear.weight, linear.bias), kind) for linear in weights.gate_up),
            tuple(products.bind(linear.weight, linear.bias) for linear in weights.down),
            weights.choice,
            products,
            None if shared is None else BoundSharedExpert.of(shared, kind, products),
        )

    def write(self, buffers: Buffers, own: ExpertBuffers, live: NDArray[np.intp]) -> None:
        """Write the experts' output for the residual's norm, already computed, to the branch."""
        self.router.write(buffers.normed_parts, own.scores)
        total = buffers.branch_array
        total[:] = 0.0
        for group in route(own.scores.numpy(), live, self.choice):
            y = self._of(group, buffers.norm.out, own)
            np.multiply(y, group.routing_weights, out=y)
            total[group.tokens] += y
        if self.shared is not None:
            total[live] += self.shared.of_all(buffers, own)[live]

    def _of(self, group: Group, normed: NDArray[np.float32], own: ExpertBuffers) -> NDArray[np.float32]:
        """Return an expert's output for its group's tokens, [n, hidden]."""
        count = len(group.tokens)
        rows = count + -count % self.products.row_multiple
        x, gate_up, gated, y = own.x[:rows], own.gate_up[:rows], own.gated[:rows], own.y[:rows]
        x.numpy()[:count] = normed[group.tokens]
        x.numpy()[count:] = 0.0
        self.first[group.expert].write(self.products.cut(x), gate_up, gated)
        self.down[group.expert].write(self.products.cut(gated), y)
        found: NDArray[np.float32] = y.numpy()[:count]
        return found
