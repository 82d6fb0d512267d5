"""The sum of the results of a token's experts, in the order of expert numbers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.kernels.triton.ops.norms import exact_square
from runahead.runtime.rounding import ceil_div

_SUMMED: Final = 1024  # numbers of a token that a program adds up


@triton.jit
def _sum_kernel(
    results, of_shared, live, gamma, scaled, squares, out, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr, STRIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sum the results of a token's experts: BLOCK numbers of a token a program.

    results: float32 [tokens, CHOSEN, WIDTH]. of_shared: float32 [tokens, PIECES, WIDTH], the shared expert's pieces,
    which are added last. ADDED: `out` is the residual to which the sum is added.
    """
    let_dependents_start(DEPENDENT)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    if gamma is not None:
        following = tl.load(gamma + i, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessors(DEPENDENT)
    is_live = tl.load(live + token) > 0
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        total += tl.load(results + (token * CHOSEN + index) * WIDTH + i, mask=inside, other=0.0)
    for piece in tl.static_range(PIECES):
        total += tl.load(of_shared + (token * PIECES + piece) * WIDTH + i, mask=inside, other=0.0)
    total = tl.where(is_live, total, 0.0)  # results of a masked token are not written
    at = token * WIDTH + i
    if ADDED:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if gamma is not None:
        value = rounded.to(tl.float32)
        tl.store(scaled + at, (value * following).to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + tile * STRIDE + token, tl.sum(tl.where(inside, exact_square(rounded), 0.0), 0))


def expert_sums(
    results: torch.Tensor,
    live: torch.Tensor,
    chosen: int,
    out: torch.Tensor,
    *,
    of_shared: torch.Tensor | None = None,
    added: bool,
    gamma: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    dependent: bool = False,
) -> int:
    """out (+)= the sum of a token's entries, in their order, in float32 and rounded once; a token that chooses nobody
    gets zero.

    results: float32 contiguous [T * chosen, hidden]. of_shared: of the expert that every token gets, which come behind
    these, float32 contiguous [T, pieces, hidden]. live: int [T], more than 0 for tokens that choose. out: contiguous
    [T, hidden]; added: it is added to. gamma, scaled, squares, all or none: `scaled`, [T, hidden], becomes `out` times
    gamma, [hidden], and `squares`, float64 [tiles or more, T or more], the sums of its squares by tiles. Returns how
    many tiles.
    """
    tokens, width = out.shape
    block = min(triton.next_power_of_2(width), _SUMMED)
    tiles = ceil_div(width, block)
    _sum_kernel[(tokens, tiles)](
        results,
        of_shared,
        live,
        gamma,
        scaled,
        squares,
        out,
        WIDTH=width,
        CHOSEN=chosen,
        PIECES=0 if of_shared is None else of_shared.shape[1],
        BLOCK=block,
        ADDED=added,
        STRIDE=0 if squares is None else squares.shape[1],
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return tiles
