"""Launches for whoever compiles kernels, after it has put a GPU in place: a rank's part of experts and embedding, what
follows a product of the vendor's library, which no GPU that is not there has, and products of many rows in chains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Experts, Linear, Norm, SharedExpert
from runahead.runtime.kernels.ranks import Shard
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled, finish_product
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.moe.layer import PackedExperts
from runahead.runtime.kernels.triton.ops.embedding import embed

COUNT, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768


def launch_what_follows_products() -> None:
    """On tensors without memory: each epilogue, and the sum with the residual."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    squares = empty(4, 256, dtype=torch.float64)
    for epilogue in (STORE, GATED, SQUARED):
        linear = Linear(empty(WIDTH, HIDDEN), empty(WIDTH))
        finish_product(empty(256, WIDTH), linear, (squares, 4, 1e-6), epilogue, "gelu_tanh")
    residual, scaled = empty(256, HIDDEN), empty(256, HIDDEN)
    into = Linear(empty(HIDDEN, WIDTH), empty(HIDDEN))
    add_scaled(empty(256, HIDDEN), into, residual, Norm(empty(HIDDEN), 1e-6), scaled, squares)


def launch_a_share() -> None:
    """On tensors without memory: many tokens, few, and a lone row. And the embedding, and what follows products."""
    launch_what_follows_products()
    embed(torch.empty(8, dtype=torch.int64, device="meta"), torch.empty((64, HIDDEN), device="meta"), 2.0, Shard(1, 4))
    empty, width = partial(torch.empty, dtype=torch.bfloat16, device="meta"), WIDTH // 4
    weights = Experts(
        Norm(empty(HIDDEN), 1e-6),
        Linear(empty(COUNT, HIDDEN), None),
        tuple(Linear(empty(2 * width, HIDDEN), None) for _ in range(COUNT)),
        tuple(Linear(empty(HIDDEN, width), None) for _ in range(COUNT)),
        Choice(CHOSEN, renormalised=True),
    )
    packed = PackedExperts.of(weights)
    arrived = empty(1, dtype=torch.int32)
    for tokens in (256, 8):
        scores, live = empty(tokens, COUNT, dtype=torch.float32), empty(tokens, dtype=torch.int32)
        packed.results(empty(tokens, HIDDEN), scores, live, arrived)
    launch_lone_rows(weights)


def launch_lone_rows(weights: Experts) -> None:
    """On tensors without memory: a lone row whose norm follows the products, with a shared expert and without one."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    first, last = Linear(empty(2 * WIDTH, HIDDEN), empty(2 * WIDTH)), Linear(empty(HIDDEN, WIDTH), empty(HIDDEN))
    live, squares = empty(1, dtype=torch.int32), empty(HIDDEN // 16, 8, dtype=torch.float64)
    residual, scaled = empty(1, HIDDEN), empty(1, HIDDEN)
    for shared in (None, SharedExpert(first, last, empty(HIDDEN))):
        packed = PackedExperts.of(replace(weights, shared=shared))
        scores = empty(1, packed.scored, dtype=torch.float32)
        found = packed.results(scaled, scores, live, live, squares=(squares, 4, 1e-6))
        packed.add(found, live, residual, weights.norm, scaled, squares, dependent=False)
        packed.made(found, live)


def launch_chains() -> None:
    """On tensors without memory: products of many rows with each epilogue, in segments in tiles of each kind, the
    largest first, and of one sum, also as a layer's O is: without a bias and without a norm before."""
    # Gluon is for compute capability 9.0 alone.
    from runahead.runtime.kernels.triton.gemm.chains_hopper import many_rows_product

    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    for rows, outputs, depth, epilogue, is_o in (
        (2048, 6144, 1024, GATED, False),
        (2048, 6144, 1024, ADD, False),
        (256, 4096, 1152, STORE, False),
        (256, 1024, 2048, SQUARED, False),
        (224, 28672, 4096, GATED, False),
        (1393, 4096, 4096, ADD, True),
        (1393, 6144, 4096, STORE, False),
    ):
        width = outputs // (2 if epilogue == GATED else 1)
        linear = Linear(empty(outputs, depth), None if is_o else empty(outputs))
        squares, out = empty(width // 8, 4096, dtype=torch.float64), empty(rows, width)
        norm, residual = Norm(empty(width), 1e-6), Residual(out, empty(rows, width), squares)
        many_rows_product(
            empty(rows, depth), linear, out, epilogue, squares=None if is_o else (squares, 4, 1e-6), dependent=True,
            norm=norm, residual=residual,
        )  # fmt: skip
