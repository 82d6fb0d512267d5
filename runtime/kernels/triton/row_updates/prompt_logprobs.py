"""Log-probabilities of prompts on the device: F's query tokens against the prompt's next tokens.

Logits are computed in tiles of a fixed number of query tokens, never for a whole chunk, so a token's bits depend
neither on other chunks nor on their number. Enqueued piece by piece, in launches without a graph.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (a kernel's pointers have no Python type)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from runahead.runtime.kernels.row_state import RowState
from runahead.runtime.kernels.triton.row_state.record import RowSizes, int_of, offset_of
from runahead.runtime.kernels.triton.row_updates.apply_plan import NO_CHUNK, RowList
from runahead.runtime.kernels.triton.row_updates.commit import ResultRing
from runahead.runtime.kernels.triton.sampling.draw import scan
from runahead.runtime.kernels.triton.sampling.logprobs import (
    LogprobBuffers,
    PromptRing,
    enqueue_logprobs,
    make_logprob_buffers,
)
from runahead.runtime.kernels.triton.sampling.parameters import LogitRows

_TILE: Final = 32  # query tokens of a logits tile
_TARGET_TILE: Final = 128
_PROMPT_LOGPROBS = offset_of("prompt_logprobs")
_NO_CHUNK = tl.constexpr(NO_CHUNK)


@dataclass(frozen=True, slots=True)
class PromptBuffers:
    """Buffers for T query tokens, rounded up to whole tiles of n."""

    asked: torch.Tensor  # int32 [T] number of top tokens; -1: the query token is skipped
    wanted: torch.Tensor  # int8 [T] asked >= 0: the bit `sampling.parameters.ASKS`
    target: torch.Tensor  # int64 [T] the prompt's next token
    indexes: torch.Tensor  # int32 [T] 0, 1, 2, ...
    logits: torch.Tensor  # float32 [n, vocab]
    partial_max: torch.Tensor  # float32 [T, tiles of the vocabulary] +inf: non-finite logits
    partial_arg: torch.Tensor  # int32 [n, tiles of the vocabulary]
    found: LogprobBuffers
    sampled_vocab: int  # ids below this may be sampled


def make_prompt_buffers(
    max_tokens: int, vocab_size: int, max_top: int, device: torch.device, sampled_vocab: int | None = None
) -> PromptBuffers:
    """Make buffers for launches of up to `max_tokens` query tokens. sampled_vocab: ids below this may be sampled; None:
    all.
    """
    tokens = triton.cdiv(max_tokens, _TILE) * _TILE
    found = make_logprob_buffers(_TILE, vocab_size, max_top, device)
    tiles = found.tile_mass.shape[1]
    return PromptBuffers(
        asked=torch.full((tokens,), -1, dtype=torch.int32, device=device),
        wanted=torch.zeros(tokens, dtype=torch.int8, device=device),
        target=torch.zeros(tokens, dtype=torch.int64, device=device),
        indexes=torch.arange(tokens, dtype=torch.int32, device=device),
        logits=torch.zeros((_TILE, vocab_size), dtype=torch.float32, device=device),
        partial_max=torch.zeros((tokens, tiles), dtype=torch.float32, device=device),
        partial_arg=torch.zeros((_TILE, tiles), dtype=torch.int32, device=device),
        found=found,
        sampled_vocab=vocab_size if sampled_vocab is None else sampled_vocab,
    )


@triton.jit
def _targets_kernel(counter, bulk, rows, state, asked, wanted, target, SIZES: tl.constexpr, TILE: tl.constexpr):
    """Write the next token of each query token of a row's tile, where its log-probabilities were asked for.

    asked: int32 [T], how many top tokens. wanted: int8 [T], 1. target: int64 [T], the next token's id.
    """
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row).to(tl.int64)
    top = int_of(state.parameters, slot, _PROMPT_LOGPROBS)
    offset = tl.load(rows.chunk_offset + row)
    if (tl.load(state.alive + slot) != 0) & (top >= 0) & (offset != _NO_CHUNK):
        start = tl.load(rows.query_start_loc + row)
        samples = tl.load(rows.sample_slots + row) != SIZES.NULL_SLOT
        entries = tl.load(rows.query_start_loc + row + 1) - start - samples.to(tl.int32)
        i = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = i < entries
        following = bulk + (tl.load(counter) % SIZES.SLOTS) * SIZES.BULK_WORDS + offset + 1 + i
        token = tl.load(following, mask=inside, other=0, volatile=True)
        token = tl.minimum(tl.maximum(token, 0), SIZES.VOCAB - 1)
        tl.store(target + start + i, token.to(tl.int64), mask=inside)
        tl.store(asked + start + i, top + tl.zeros([TILE], tl.int32), mask=inside)
        tl.store(wanted + start + i, tl.full([TILE], 1, tl.int8), mask=inside)


def find_targets(
    num_rows: int,
    num_tokens: int,
    counter: torch.Tensor,
    bulk: torch.Tensor,
    rows: RowList,
    state: RowState,
    out: PromptBuffers,
    sizes: RowSizes,
) -> None:
    """Find the query tokens with requested log-probabilities and their target tokens: `asked`, `wanted`, `target`."""
    out.asked[:num_tokens].fill_(-1)
    out.wanted[:num_tokens].zero_()
    _targets_kernel[(num_rows, triton.cdiv(num_tokens, _TARGET_TILE))](
        counter,
        bulk,
        rows,
        state.columns,
        out.asked,
        out.wanted,
        out.target,
        SIZES=sizes,
        TILE=_TARGET_TILE,
        num_warps=4,
    )


def leave_prompt_logprobs(
    counter: torch.Tensor,
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    buffers: PromptBuffers,
    results: ResultRing,
) -> None:
    """Write log-probabilities of the query tokens of `find_targets` into the running launch's result ring.

    hidden: [T, hidden] final hidden states. logits_of: [n, hidden] to [n, vocab], or to [n, 0] on ranks other than the
    first. A query token with non-finite logits writes zeros, and a peak of +inf in `partial_max`: its row has failed
    (`finite_kernel`).
    """
    tokens = hidden.shape[0]
    ring = PromptRing(counter, results.prompt_logprob, results.prompt_top_ids, results.prompt_top_logprobs)
    for first in range(0, tokens, _TILE):
        tile = hidden[first : first + _TILE]
        if tile.shape[0] < _TILE:  # a constant number of rows, because a product's bits may depend on it
            tile = torch.cat((tile, tile.new_zeros((_TILE - tile.shape[0], tile.shape[1]))))
        logits = logits_of(tile)
        if not logits.shape[1]:
            continue  # the first rank has them
        buffers.logits.copy_(logits)
        indexes = buffers.indexes[first : first + _TILE]
        peaks = buffers.partial_max[first : first + _TILE]
        rows = LogitRows(buffers.logits, buffers.logits.stride(0), buffers.indexes[:_TILE], indexes)
        scan(rows, buffers.wanted, peaks, buffers.partial_arg, sampled_vocab=buffers.sampled_vocab)
        wanted, target = buffers.wanted[first : first + _TILE], buffers.target[first : first + _TILE]
        enqueue_logprobs(rows, wanted, buffers.asked, peaks, target, buffers.found, ring)
