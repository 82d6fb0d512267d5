"""Products of more than 64 rows with what follows them, for compute capability 9.0, with warp specialization: one
producer warp issues TMA copies of the rows and the weights, and two consumer groups compute. In a product of segments
these have chains (`segments`, `chain_of`): while a group adds a chain to its sums, the matrix units compute the other
group's chain.

The groups divide a tile's rows or, where all tiles run at a time, its segments. The bits are the same as in
`small_batch_gemm.py`. Written in Gluon, Triton's language for explicit warps and layouts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)
# mypy: disable-error-code="assignment, misc"
# (nor has a tuple that grows)

from __future__ import annotations

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from runahead.runtime.kernels.activations import is_gelu_tanh
from runahead.runtime.kernels.layers import Activation, Linear, Norm
from runahead.runtime.kernels.triton.gemm.copies_hopper import STEP, copying_warp, tile_at
from runahead.runtime.kernels.triton.gemm.end_hopper import ROWS, Sizes, end_tile
from runahead.runtime.kernels.triton.gemm.epilogue import ADD, GATED, Squares
from runahead.runtime.kernels.triton.gemm.small_batch_gemm import Residual
from runahead.runtime.kernels.triton.gemm.tuning import chain_of, one_sum_tile, segments
from runahead.runtime.kernels.triton.gpu.pdl import let_dependents_start, wait_for_predecessors
from runahead.runtime.rounding import ceil_div

REGISTERS: Final = 240  # of a consumer thread; the rest is for the producer
PRODUCER_REGISTERS: Final = 32

_RING_BYTES: Final = 192 << 10
_MOST_STAGES: Final = 8

_ROWS, _STEP = gl.constexpr(ROWS), gl.constexpr(STEP)
_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(REGISTERS), gl.constexpr(PRODUCER_REGISTERS)


@gluon.jit
def _no_sums(ring):
    PIECE: gl.constexpr = ring.shape[1]
    return gl.zeros([_ROWS, PIECE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16]))


@gluon.jit
def _one_sum(ring, done, GROUP_OF: gl.constexpr, SIZES: gl.constexpr):
    """Return a group's sums of a tile, a tensor for each piece. done: steps before, which give a ring's stage and
    phase."""
    row_ring, rings, ready, free = ring
    STAGES: gl.constexpr = SIZES.STAGES
    STEPS: gl.constexpr = SIZES.DEPTH // _STEP
    accs = ()
    for piece in gl.static_range(len(rings)):
        accs = accs + (_no_sums(rings[piece]),)  # noqa: RUF005
    for step in range(STEPS):
        stage = (done + step) % STAGES
        mbarrier.wait(ready.index(stage), (done + step) // STAGES & 1)
        made = ()
        for piece in gl.static_range(len(rings)):
            weights = rings[piece].index(stage).permute((1, 0))
            one = warpgroup_mma(row_ring.index(stage * 2 + GROUP_OF), weights, accs[piece], is_async=True)
            made = made + (one,)  # noqa: RUF005
        waited = warpgroup_mma_wait(len(rings), deps=made)
        accs = (waited,) if len(rings) == 1 else waited
        mbarrier.arrive(free.index((done + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    waited = warpgroup_mma_wait(0, deps=accs)
    mbarrier.arrive(free.index((done + STEPS - 1) % STAGES), count=1)
    return (waited,) if len(rings) == 1 else waited


@gluon.jit
def _segment(ring, order, done, GROUP_OF: gl.constexpr, SIZES: gl.constexpr):
    """Return the sums of the group's next segment."""
    row_ring, rings, ready, free = ring
    STAGES: gl.constexpr = SIZES.STAGES
    CHAIN: gl.constexpr = SIZES.CHAIN
    sums = _no_sums(rings[0])
    for _ in range(SIZES.DEPTH // (SIZES.SEGMENTS * CHAIN * _STEP)):
        if SIZES.PACED:  # the first group does not wait for its first chain
            mbarrier.wait(order.index(GROUP_OF), done // CHAIN & 1 ^ (1 - GROUP_OF))
        chain = _no_sums(rings[0])
        for step in gl.static_range(CHAIN):
            stage, phase = (done + step) % STAGES, (done + step) // STAGES & 1
            mbarrier.wait(ready.index(stage), phase)
            weights = rings[0].index(stage * 2 + GROUP_OF if SIZES.SPLIT else stage).permute((1, 0))
            chain = warpgroup_mma(row_ring.index(stage * 2 + GROUP_OF), weights, chain, use_acc=step > 0, is_async=True)
        if SIZES.PACED:
            mbarrier.arrive(order.index(1 - GROUP_OF), count=1)
        for step in gl.static_range(CHAIN):
            chain = warpgroup_mma_wait(CHAIN - 1 - step, deps=[chain])
            mbarrier.arrive(free.index((done + step) % STAGES), count=1)
        sums += chain
        done += CHAIN
    return sums, done


@gluon.jit
def _computing_group(
    ring, order, totals, end, row_tiles, GROUP_OF: gl.constexpr, SIZES: gl.constexpr, DEPENDENT: gl.constexpr
):
    """Compute half of the rows of the tiles in order or, if SPLIT, half of their segments. GROUP_OF: 0 or 1, the
    group's index."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ring[1][0].shape[1], 16])
    SEGMENTS: gl.constexpr = SIZES.SEGMENTS
    STEPS: gl.constexpr = SIZES.DEPTH // _STEP // (2 if SIZES.SPLIT else 1)
    wait_for_predecessors(DEPENDENT)
    done = 0
    for tile in range(gl.program_id(0), row_tiles * SIZES.TILES, gl.num_programs(0)):
        rows, outputs = tile_at(tile, row_tiles, SIZES)
        if SIZES.SPLIT:
            # Every second segment is added to those before, which the other group has left in `totals`; the second
            # group has the tile's sums.
            earlier = done // STEPS * (SEGMENTS // 2)
            total = _no_sums(totals)
            steps = done
            for segment in range(SEGMENTS // 2):
                one, steps = _segment(ring, order, steps, GROUP_OF, SIZES)
                mbarrier.wait(order.index(GROUP_OF), (earlier + segment) & 1 ^ (1 - GROUP_OF))
                total = totals.load(SUMS) + one
                is_last = GROUP_OF == 1 and segment == SEGMENTS // 2 - 1
                totals.store(gl.where(is_last, 0.0, total))
                mbarrier.arrive(order.index(1 - GROUP_OF), count=1)
            if GROUP_OF == 1:
                end_tile((total,), outputs, rows * _ROWS, end, SIZES)
        else:
            if SEGMENTS == 1:
                accs = _one_sum(ring, done, GROUP_OF, SIZES)
            else:
                total = _no_sums(ring[1][0])
                steps = done
                for _ in range(SEGMENTS):
                    one, steps = _segment(ring, order, steps, GROUP_OF, SIZES)
                    total += one
                accs = (total,)
            row = (rows * 2 + GROUP_OF) * _ROWS
            end_tile(accs, outputs, row, end, SIZES)
        done += STEPS


@gluon.jit(do_not_specialize=["squares_tiles", "stride", "num_rows"])
def chains_kernel(
    x, weight, bias, squares_in, out, gamma, scaled, squares_out, eps, squares_tiles, stride, num_rows,
    SIZES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute tiles of 128 rows, 64 if SPLIT, and WIDTH outputs. A tile of one sum may need several PIECES. A ring
    stage is ready when its bytes have arrived, and free when both consumer groups have released it.
    """
    let_dependents_start(DEPENDENT)
    STAGES: gl.constexpr = SIZES.STAGES
    PIECES: gl.constexpr = SIZES.PIECES
    COPIES: gl.constexpr = 2 if SIZES.SPLIT else 1
    HEIGHT: gl.constexpr = 2 * _ROWS // COPIES
    MARK: gl.constexpr = mbarrier.MBarrierLayout()
    row_ring = gl.allocate_shared_memory(x.dtype, [STAGES * 2, _ROWS, _STEP], x.layout)
    rings = ()
    for piece in gl.static_range(len(PIECES)):
        made = gl.allocate_shared_memory(x.dtype, [STAGES * COPIES, PIECES[piece], _STEP], weight.layout)
        rings = rings + (made,)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], MARK)
    order = ready  # stands for a barrier that is not used
    # Triton gives the memory of a barrier that nothing waits for to other data, and these are lost when another process
    # gets the GPU in between: such a barrier is not made.
    if SIZES.SPLIT or SIZES.PACED:
        order = gl.allocate_shared_memory(gl.int64, [2, 1], MARK)
        mbarrier.init(order.index(0), count=1)
        mbarrier.init(order.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    totals = order
    if SIZES.SPLIT:
        totals = gl.allocate_shared_memory(gl.float32, [_ROWS, PIECES[0]], gl.NVMMASharedLayout(128, 32, 2))
        totals.store(_no_sums(rings[0]))
    fence_async_shared()
    row_tiles = (num_rows + HEIGHT - 1) // HEIGHT
    end = (bias, squares_in, out, gamma, scaled, squares_out, eps, squares_tiles, stride, num_rows)
    ring = (row_ring, rings, ready, free)
    gl.warp_specialize(
        [
            (_computing_group, (ring, order, totals, end, row_tiles, 0, SIZES, DEPENDENT)),
            (_computing_group, (ring, order, totals, end, row_tiles, 1, SIZES, DEPENDENT)),
            (copying_warp, (x, weight, ring, row_tiles, SIZES, DEPENDENT)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def many_rows_product(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    epilogue: int,
    *,
    squares: Squares = None,
    norm: Norm | None = None,
    residual: Residual | None = None,
    activation: Activation = "silu",
    dependent: bool = False,
) -> int:
    """`small_batch_product` of any number of rows, in bfloat16. Returns the number of tiles of squares.

    x: contiguous [T or more, in], `in` a multiple of 64. linear: outputs a multiple of 16. out: contiguous [T,
    outputs]. dependent: launched programmatically.
    """
    rows, weight, halves = out.shape[0], linear.weight, 2 if epilogue == GATED else 1
    depth = weight.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    splits = segments(*weight.shape)
    chain = chain_of(depth, splits)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    weights, split = tile_of(rows, weight.shape[0], splits, programs)
    pieces, width, outputs = _pieces_of(weights), weights // halves, weight.shape[0] // halves
    tiles, box = ceil_div(outputs, width), min(pieces) // halves
    layout = gl.NVMMASharedLayout(128, 16, 2)
    found, count, eps = squares if squares is not None else (x, 0, 0.0)
    gamma, scaled, left = x, x, found
    if epilogue == ADD:
        assert norm is not None and residual is not None and tiles <= residual.squares.shape[0]
        gamma, scaled, left = norm.weight, residual.scaled, residual.squares
    stage_bytes = 2 * STEP * (2 * ROWS + weights * (2 if split else 1))
    chains_kernel[(min(programs, ceil_div(rows, ROWS if split else 2 * ROWS) * tiles),)](
        TensorDescriptor(x, [rows, depth], [depth, 1], [ROWS, STEP], layout),
        TensorDescriptor(weight, [outputs * halves, depth], [depth, 1], [box, STEP], layout),
        x if linear.bias is None else linear.bias,
        found,
        out,
        gamma,
        scaled,
        left,
        eps,
        count,
        left.shape[1],
        rows,
        SIZES=Sizes(
            tiles,
            depth,
            SEGMENTS=splits,
            CHAIN=max(chain // STEP, 1),
            OUTPUTS=outputs,
            PIECES=pieces,
            WIDTH=width,
            HALVES=halves,
            BOX=box,
            SPLIT=split,
            PACED=splits > 1 and not split and pieces[0] > ROWS,  # measured
            STAGES=min(_MOST_STAGES, _RING_BYTES // stage_bytes),
            SCALED=squares is not None,
            EPILOGUE=epilogue,
            HAS_BIAS=linear.bias is not None,
            GELU=is_gelu_tanh(activation),
        ),
        DEPENDENT=dependent,
        launch_pdl=dependent,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return tiles


def tile_of(rows: int, outputs: int, splits: int, programs: int) -> tuple[int, bool]:
    """Return a tile's weights, and whether its groups divide the segments: the smallest tiles that all run at a time,
    else the largest. No bit depends on it. outputs: rows of the weights."""
    if splits == 1:
        return one_sum_tile(rows, outputs, programs)[0], False
    strips, halves = ceil_div(outputs, 64), ceil_div(rows, ROWS)
    if halves * strips <= programs:
        return 64, True
    return (64, False) if ceil_div(halves, 2) * strips <= programs else (128, False)


def _pieces_of(weights: int) -> tuple[int, ...]:
    """Cut a tile's weights, a multiple of 32, for matrix instructions that take a power of two each."""
    return (*[128] * (weights // 128), *(size for size in (64, 32) if weights % 128 & size))
