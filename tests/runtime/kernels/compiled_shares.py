"""Launches of experts of which a rank has a part, for whoever compiles kernels: after it has put a GPU in place."""

from __future__ import annotations

from functools import partial

import torch

from runahead.runtime.kernels.choice import Choice
from runahead.runtime.kernels.layers import Experts, Linear, Norm
from runahead.runtime.kernels.share import Share
from runahead.runtime.kernels.triton.expert_layers import PackedExperts

COUNT, CHOSEN, HIDDEN, WIDTH = 128, 8, 2048, 768


def launch_a_share() -> None:
    """On tensors without memory: many tokens, few, and a lone row."""
    share = Share(1, 4)
    empty, own = partial(torch.empty, dtype=torch.bfloat16, device="meta"), len(share.part_of(COUNT, "experts"))
    packed = PackedExperts.of(
        Experts(
            Norm(empty(HIDDEN), 1e-6),
            Linear(empty(COUNT, HIDDEN), None),
            tuple(Linear(empty(2 * WIDTH, HIDDEN), None) for _ in range(own)),
            tuple(Linear(empty(HIDDEN, WIDTH), None) for _ in range(own)),
            Choice(CHOSEN, renormalised=True),
            share=share,
        )
    )
    arrived = empty(1, dtype=torch.int32)
    for tokens in (256, 8):
        scores, live = empty(tokens, COUNT, dtype=torch.float32), empty(tokens, dtype=torch.int32)
        packed.results(empty(tokens, HIDDEN), scores, live, arrived, together=tokens == 8)
    packed.add_of_one_row(empty(1, HIDDEN), empty(1, COUNT, dtype=torch.float32), arrived, dependent=False)
