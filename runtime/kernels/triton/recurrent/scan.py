"""Device functions of recurrent mixers for rows with several query tokens: a token's row, sub-chunks, the convolution,
its window for the next launch, and the gated norm.

A *sub-chunk* is the tokens of a row that a scan computes at once, by matrix products. Its boundaries are positions of
the request that are multiples of its length, wherever a launch begins. A chunk that ends at such a position changes no
bit, since the state there is passed on in any case. A chunk that ends within a sub-chunk splits it into two, which are
rounded separately.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.gpu.capability import current_gpu
from runahead.runtime.kernels.triton.ops.gates import logistic
from runahead.runtime.kernels.triton.ops.norms import squares_of
from runahead.runtime.kernels.triton.recurrent.rows import StateRows, leave_state, row_of
from runahead.runtime.rounding import ceil_div

_LENGTH: Final = 64  # of a sub-chunk
_LENGTH_OF_FLOAT32: Final = 32  # the same, of twice as many bytes a number
_STAGES: Final = 3  # sub-chunks on their way at a time, where a program has the memory for it
_MEMORY_OF_STAGES: Final = 160 * 1024  # bytes that they need, of a head of 128 numbers
_TOKENS: Final = 32  # that a program convolves
_CHANNELS: Final = 128  # of a program that convolves, or keeps what will be seen again
_GATED: Final = 2048  # numbers of a program that takes norms


def length_of_sub_chunks(dtype: torch.dtype) -> int:
    """Return the tokens of a sub-chunk. dtype: of the model."""
    return _LENGTH_OF_FLOAT32 if dtype == torch.float32 else _LENGTH


def stages_of_scans() -> int:
    """Sub-chunks on their way at a time."""
    gpu = current_gpu()
    return _STAGES if gpu is not None and gpu.shared_memory >= _MEMORY_OF_STAGES else 1


class ChunkRows:
    """A batch's rows and their sub-chunks, for all layers. A *long* row is live and has several query tokens. length:
    tokens of a sub-chunk."""

    def __init__(self, batch: ForwardBatch, length: int) -> None:
        assert batch.state_slots is not None, "a model that keeps states is given a batch that names no state slots"
        self.batch = batch
        # Both or neither: without snapshots a row goes on from its own slot, and leaves its state nowhere else.
        self.snapshots = batch.states_read_from is not None
        self.read_from = batch.state_slots if batch.states_read_from is None else batch.states_read_from
        self.states = StateRows(
            batch.query_start_loc, batch.seq_lens, batch.positions, batch.state_slots, batch.states_read_from,
            batch.states_copied_to,
        )  # fmt: skip
        self.length = length

    @cached_property
    def of_tokens(self) -> torch.Tensor:
        """The number of each query token's row, if that is long; -1 of all others, and of padding. int32 [T]"""
        batch, ends = self.batch, self.batch.query_start_loc[1:]
        token = torch.arange(batch.num_tokens, dtype=torch.int32, device=ends.device)
        row = torch.searchsorted(ends, token, right=True).clamp(max=batch.num_rows - 1)
        return row.int().masked_fill(~self._long[row] | (token >= ends[-1]), -1)

    @cached_property
    def _long(self) -> torch.Tensor:
        """bool [R]"""
        return (self.batch.seq_lens > 0) & (self.batch.query_start_loc.diff() > 1)

    @cached_property
    def sub_chunks(self) -> SubChunks:
        """Return the sub-chunks of all long rows."""
        batch, length = self.batch, self.length
        starts = batch.query_start_loc[:-1]
        counts = batch.query_start_loc.diff()
        firsts = batch.positions[starts.clamp(max=batch.num_tokens - 1)]  # a row without any may begin behind all
        parts = ((firsts % length + counts + length - 1) // length).masked_fill(~self._long, 0)
        ends = parts.cumsum(0)
        most = batch.num_tokens // length + 2 * min(batch.num_rows, ceil_div(batch.num_tokens, 2))
        number = torch.arange(most, device=ends.device)
        row = torch.searchsorted(ends, number, right=True).clamp(max=batch.num_rows - 1)
        before = ends - parts
        part = (number - before[row]).masked_fill(number >= ends[-1], -1)
        return SubChunks(row.int(), part.int(), before.int())


@dataclass(frozen=True, slots=True)
class SubChunks:
    """The sub-chunks of a batch. row, part: int32 [most], each one's row and its index in the row; -1: none. before:
    int32 [rows], the number of sub-chunks of earlier rows."""

    row: torch.Tensor
    part: torch.Tensor
    before: torch.Tensor

    @property
    def most(self) -> int:
        return self.row.shape[0]


@triton.jit
def _convolve_kernel(
    projected, conv_weight, conv_bias, conv_state, row_of_token, read_from, positions, query_start_loc, out,
    num_tokens, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of long rows, and apply SiLU: BLOCK channels of TOKENS tokens a program.

    Each sum has the order of `convolved_of` in `runs.py`. out: [num_tokens, CHANNELS].
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_token + token, mask=token < num_tokens, other=-1)
    live, in_channels = row >= 0, channel < CHANNELS
    source = tl.load(read_from + row, mask=live, other=0).to(tl.int64)
    start = tl.load(query_start_loc + row, mask=live, other=0)
    goes_on = live & (tl.load(positions + start, mask=live, other=0) > 0)
    i = token - start  # of the row's query tokens
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(WINDOW):
        back = WINDOW - 1 - tap
        line = (token - back).to(tl.int64)[:, None] * WIDTH + FIRST + channel[None, :]
        here = (live & (i >= back))[:, None] & in_channels[None, :]
        seen = tl.load(projected + line, mask=here, other=0.0).to(tl.float32)
        if tap < WINDOW - 1:
            kept = (source * (WINDOW - 1) + WINDOW - 1 + i - back)[:, None] * CHANNELS + channel[None, :]
            before = (goes_on & (i < back))[:, None] & in_channels[None, :]
            seen += tl.load(conv_state + kept, mask=before, other=0.0)
        weight = tl.load(conv_weight + channel * WINDOW + tap, mask=in_channels, other=0.0).to(tl.float32)
        total += seen * weight[None, :]
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, mask=in_channels, other=0.0).to(tl.float32)[None, :]
    at = token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    total = (total * logistic(total)).to(out.dtype.element_ty)
    tl.store(out + at, total, mask=live[:, None] & in_channels[None, :])


@triton.jit
def _keep_channels_kernel(
    projected, conv_state, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, SNAPSHOTS: tl.constexpr,
):  # fmt: skip
    """Store the last WINDOW - 1 inputs of each long row in its slot: BLOCK channels of a row a program."""
    start, count, slot, source, copy, live, goes_on = row_of(tl.program_id(0), rows, SNAPSHOTS)
    if live & (count > 1):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        tap = tl.arange(0, KEPT)[:, None]
        ok = (tap < WINDOW - 1) & (channel < CHANNELS)
        i = count - (WINDOW - 1) + tap  # of the row's query tokens; below 0 it is one that the slot holds
        line = (start + i).to(tl.int64) * WIDTH + FIRST + channel
        seen = tl.load(projected + line, mask=ok & (i >= 0), other=0.0).to(tl.float32)
        of_slot = conv_state + tap * CHANNELS + channel
        SIZE: tl.constexpr = (WINDOW - 1) * CHANNELS
        seen += tl.load(of_slot + source * SIZE + count * CHANNELS, mask=ok & (i < 0) & goes_on, other=0.0)
        tl.debug_barrier()  # what is written here is read by other threads
        leave_state(of_slot, slot, copy, seen, ok, SIZE, SNAPSHOTS)


@triton.jit
def _gated_norm_kernel(
    projected, y, gamma, row_of_token, out, squares, eps, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    WIDTH: tl.constexpr, GATE_FIRST: tl.constexpr, PROGRAM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply the norm by groups and the gate: PROGRAM_GROUPS groups of a token a program.

    GATE_FIRST: the norm is of what the gate has left, by a weight for every number; else the gate is of the norm, whose
    weight is every group's. squares: gets the one group's sum of squares, and what the gate has left is multiplied by
    the weight alone.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * PROGRAM_GROUPS + tl.arange(0, PROGRAM_GROUPS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    index = group * SHARE + i
    inside = (group < GROUPS) & (i < SHARE)
    live = inside & (tl.load(row_of_token + token) >= 0)
    value = tl.load(y + token * (GROUPS * SHARE) + index, mask=live, other=0.0).to(tl.float32)
    z = tl.load(projected + token * WIDTH + index, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(gamma + (index if GATE_FIRST else i), mask=inside, other=0.0).to(tl.float32)
    if GATE_FIRST:
        value *= z * logistic(z)
    if squares is not None:
        tl.store(squares + token, tl.sum(tl.reshape(squares_of(value), [PROGRAM_GROUPS * BLOCK]), 0))
        value *= weight
    else:
        value *= tl.rsqrt(tl.sum(value * value, 1) / SHARE + eps)[:, None] * weight
    if not GATE_FIRST:
        value *= z * logistic(z)
    tl.store(out + token * (GROUPS * SHARE) + index, value.to(out.dtype.element_ty), mask=inside)


def convolve(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    rows: ChunkRows,
    first: int,
) -> torch.Tensor:
    """The convolution of every token of a long row and its SiLU, [T, channels] in the dtype of `projected`.

    projected: contiguous [T, width], whose channels begin at `first`. conv_weight: [channels, 1, window]. conv_bias:
    [channels]. conv_state: float32 [state slots, window - 1, channels]; it stays as it is.
    """
    (tokens, width), (channels, _, window) = projected.shape, conv_weight.shape
    batch, out = rows.batch, projected.new_empty((tokens, channels))
    _convolve_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))](
        projected,
        conv_weight,
        conv_bias,
        conv_state,
        rows.of_tokens,
        rows.read_from,
        batch.positions,
        batch.query_start_loc,
        out,
        tokens,
        FIRST=first,
        WIDTH=width,
        CHANNELS=channels,
        WINDOW=window,
        TOKENS=_TOKENS,
        BLOCK=_CHANNELS,
        num_warps=4,
    )
    return out


def keep_channels(projected: torch.Tensor, conv_state: torch.Tensor, rows: ChunkRows, first: int) -> None:
    """Store the convolution's window of long rows, in place; other rows' slots are unchanged. Call it after `convolve`,
    with the same arguments."""
    _, kept, channels = conv_state.shape
    batch = rows.batch
    _keep_channels_kernel[(batch.num_rows, triton.cdiv(channels, _CHANNELS))](
        projected,
        conv_state,
        rows.states,
        FIRST=first,
        WIDTH=projected.shape[1],
        CHANNELS=channels,
        WINDOW=kept + 1,
        KEPT=triton.next_power_of_2(kept),
        BLOCK=_CHANNELS,
        SNAPSHOTS=rows.snapshots,
        num_warps=4,
    )


def gated_norm(
    projected: torch.Tensor,
    y: torch.Tensor,
    gamma: torch.Tensor,
    eps: float,
    rows: ChunkRows,
    groups: int,
    *,
    gate_first: bool,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm of `y` by groups, and the gate z, SiLU: what a mixer's `out` reads, [T, inner]. Zeros for tokens of no
    long row.

    projected: contiguous [T, width], z first. y: contiguous [T, inner]. gate_first: the norm is of what the gate has
    left, and gamma is [inner]; else the gate is of the norm, and gamma is [inner / groups]. squares: float64 [1 or
    more, T or more], of one group and with gate_first: the norm's scale is left to the reader, and each token's sum of
    squares is stored here.
    """
    assert squares is None or (gate_first and groups == 1)
    tokens, inner = y.shape
    block = triton.next_power_of_2(inner // groups)
    some = max(1, min(triton.next_power_of_2(groups), _GATED // block))
    out = torch.empty_like(y)
    _gated_norm_kernel[(tokens, triton.cdiv(groups, some))](
        projected,
        y,
        gamma,
        rows.of_tokens,
        out,
        squares,
        eps,
        GROUPS=groups,
        SHARE=inner // groups,
        WIDTH=projected.shape[1],
        GATE_FIRST=gate_first,
        PROGRAM_GROUPS=some,
        BLOCK=block,
        num_warps=4 if block * some >= 1024 else 1,
    )
    return out
