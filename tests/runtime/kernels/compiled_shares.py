"""Launches for whoever compiles kernels, after it has put a GPU in place: experts of which a rank has a part, and what
follows a product of the vendor's library, which no GPU that is not there has."""

from __future__ import annotations

from functools import partial

import torch

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Experts, Linear, Norm
from runahead.runtime.kernels.triton.gemm.gemv import GATED, SQUARED, STORE
from runahead.runtime.kernels.triton.gemm.separate_epilogue import add_scaled, finish_product
from runahead.runtime.kernels.triton.moe.layer import PackedExperts

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
    """On tensors without memory: many tokens, few, and a lone row. And what follows products."""
    launch_what_follows_products()
    empty, width = partial(torch.empty, dtype=torch.bfloat16, device="meta"), WIDTH // 4
    packed = PackedExperts.of(
        Experts(
            Norm(empty(HIDDEN), 1e-6),
            Linear(empty(COUNT, HIDDEN), None),
            tuple(Linear(empty(2 * width, HIDDEN), None) for _ in range(COUNT)),
            tuple(Linear(empty(HIDDEN, width), None) for _ in range(COUNT)),
            Choice(CHOSEN, renormalised=True),
        )
    )
    arrived = empty(1, dtype=torch.int32)
    for tokens in (256, 8):
        scores, live = empty(tokens, COUNT, dtype=torch.float32), empty(tokens, dtype=torch.int32)
        packed.results(empty(tokens, HIDDEN), scores, live, arrived, together=tokens == 8)
    packed.add_of_one_row(empty(1, HIDDEN), empty(1, COUNT, dtype=torch.float32), arrived, dependent=False)
