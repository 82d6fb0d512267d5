"""Begins a row: the host's columns and the device's admission record."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT
from runahead.runtime.plan import Admission
from runahead.runtime.row_record import (
    ADMIT_WORDS,
    COUNT_SEEN,
    COUNT_TOKEN,
    COUNT_WORDS,
    PROMPT_BIT,
    ROW_RECORD,
    mask_words,
    signed_64,
)
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS, SamplingParams, StoppingParams

# The sampling parameters in a record, in the record's order.
_NAMES: Final = ROW_RECORD.names
SAMPLING_NUMBERS: Final = _NAMES[_NAMES.index("row_slot") + 1 : _NAMES.index("min_position")]
_sampling_words_of: Callable[[SamplingParams], tuple[float, ...]] = attrgetter(*SAMPLING_NUMBERS)

NO_COUNTS: Final = np.zeros((0, COUNT_WORDS), np.int32)
NO_HISTORY: Final = np.zeros(0, np.int32)


def eos_and_stop_ids(stopping: StoppingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids that end the row, each once: the model's end-of-sequence ids unless ignored, then the request's
    stop ids."""
    eos = () if stopping.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*eos, *stopping.stop_token_ids)))


def needs_full(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    """Return whether the row needs more than greedy or temperature sampling."""
    if sampling.has_penalty:
        return True
    masks = bool(sampling.bias_ids or sampling.allowed_mask or stopping.min_tokens)
    return sampling.has_filter or masks or sampling.logprobs >= 0


def record_words(
    sampling: SamplingParams,
    stopping: StoppingParams,
    eos_token_ids: tuple[int, ...],
    *,
    blocks: int = 0,
    counts: int = 0,
    history: int = 0,
) -> int:
    """Return the words of the record that `admission_record` would make.

    blocks: its cached blocks. counts: entries of its penalty list. history: its history tokens.
    """
    stops = len(eos_and_stop_ids(stopping, eos_token_ids))
    lists = stops + 2 * len(sampling.bias_ids) + len(sampling.allowed_mask) // 4 + blocks
    return ADMIT_WORDS + lists + COUNT_WORDS * counts + history


def largest_record_words(vocab_size: int, context_length: int, max_blocks: int) -> int:
    """Return the words of the largest record that any request can need, without the history that some drafters read."""
    lists = MAX_STOP_IDS + 2 * MAX_BIAS + mask_words(vocab_size) + max_blocks
    return ADMIT_WORDS + lists + COUNT_WORDS * min(context_length, vocab_size)


def admission_record(
    slot: int,
    sampling: SamplingParams,
    stopping: StoppingParams,
    prompt_len: int,
    max_len: int,
    eos_token_ids: tuple[int, ...],
    *,
    blocks: Sequence[int] = (),
    penalty_slot: int = NO_SLOT,
    state_slot: int = NO_SLOT,
    begins_as: int = NO_SNAPSHOT,
    counts: NDArray[np.int32] = NO_COUNTS,
    history: NDArray[np.int32] = NO_HISTORY,
    mask_epoch: int = 0,
) -> NDArray[np.int32]:
    """Return the record of one admission, laid out as `runahead.runtime.row_record` says. [record_words]

    prompt_len: tokens of the original prompt, whatever is known of the completion. blocks: the cached prefix, with
    which the row's block table begins. counts: int32 [n, COUNT_WORDS], only with penalties: see `penalty_list`.
    history: [n] the row's first tokens, which no chunk brings, for drafters that need them. mask_epoch: the slot's
    epoch if the row has a grammar. Raises ValueError for penalties without a penalty slot.
    """
    has_penalty = sampling.has_penalty
    if has_penalty and penalty_slot < 0:
        raise ValueError("a request with penalties was admitted without a penalty slot")
    stops = eos_and_stop_ids(stopping, eos_token_ids)
    first = (signed_64(sampling.seed), mask_epoch, slot)
    rest = (
        prompt_len + stopping.min_tokens,
        max_len - 1,
        len(stops),
        len(sampling.bias_ids),
        len(sampling.allowed_mask) // 4,
        len(blocks),
        penalty_slot if has_penalty else NO_SLOT,
        len(counts),
        state_slot,
        len(history),
        begins_as,
    )
    head = ROW_RECORD.struct.pack(*(first + _sampling_words_of(sampling) + rest))
    sections: list[bytes | array[Any] | memoryview] = [head, array("i", stops)]
    if sampling.bias_ids:
        sections += (array("i", sampling.bias_ids), array("f", sampling.bias_values))
    sections += (sampling.allowed_mask, array("i", blocks))
    if len(counts):
        sections.append(np.ascontiguousarray(counts).data)
    if len(history):
        sections.append(np.ascontiguousarray(history).data)
    return np.frombuffer(b"".join(sections), np.int32)


def penalty_list(prompt_ids: NDArray[np.int32], completion: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tokens of a row and their counts: int32 [n, COUNT_WORDS], each token once, ids ascending.

    prompt_ids: the prompt's distinct ids, ascending, if there is a repetition penalty; else none. completion: [m]
    completion tokens before the request was evicted, in any order.

    Apart from copying `prompt_ids`, the time is proportional to the completion.
    """
    if not completion.size:
        return _entries(prompt_ids, PROMPT_BIT)
    said, times = np.unique(completion, return_counts=True)
    indexes = np.searchsorted(prompt_ids, said)
    found = np.zeros(said.size, np.bool_)
    if prompt_ids.size:
        found = prompt_ids[np.minimum(indexes, prompt_ids.size - 1)] == said
    ids, seen = prompt_ids, np.full(prompt_ids.size, PROMPT_BIT, np.int32)
    seen[indexes[found]] |= times[found].astype(np.int32)
    if not found.all():
        new = ~found
        ids, seen = np.insert(ids, indexes[new], said[new]), np.insert(seen, indexes[new], times[new])
    return _entries(ids, seen)


def _entries(ids: NDArray[np.int32], seen: NDArray[np.int32] | int) -> NDArray[np.int32]:
    entries = np.empty((ids.size, COUNT_WORDS), np.int32)
    entries[:, COUNT_TOKEN], entries[:, COUNT_SEEN] = ids, seen
    return entries


def begin_row(rows: Rows, request: Request, block_size: int, limits: SchedulerLimits) -> Admission:
    """Fill the columns of the row slot that the request just got, and return its admission. Its blocks are its cached
    prefix."""
    slot, stopping, sampling = request.row_slot, request.stopping, _sampling_of(request)
    stops = eos_and_stop_ids(stopping, limits.eos_token_ids)
    prompt_len, cached = request.prompt.size, len(request.blocks) * block_size
    rows.begin(slot, request.tokens, len(request.blocks), cached)
    rows.prompt_len[slot] = prompt_len
    rows.max_len[slot] = request.max_len
    rows.min_position[slot] = prompt_len + stopping.min_tokens
    rows.needs_full[slot] = request.may_hold or needs_full(request.sampling, stopping)
    rows.may_hold[slot] = request.may_hold
    rows.owner[slot], rows.handle[slot], rows.order[slot] = request.owner, request.handle, request.order
    rows.logprobs[slot] = sampling.logprobs
    rows.prompt_logprobs[slot] = sampling.prompt_logprobs
    rows.stop_ids[slot] = -1
    rows.stop_ids[slot, : len(stops)] = stops
    rows.stop_width = max(rows.stop_width, len(stops))
    return Admission(
        slot,
        admission_record(
            slot,
            sampling,
            stopping,
            prompt_len,
            request.max_len,
            limits.eos_token_ids,
            blocks=request.blocks,
            penalty_slot=request.penalty_slot,
            state_slot=request.state_slot,
            begins_as=request.begins_as,
            counts=_counts_of(request),
            history=request.tokens[:cached] if limits.history else NO_HISTORY,
            mask_epoch=int(rows.epoch[slot]) if request.may_hold else 0,
        ),
    )


def begin_again(rows: Rows, request: Request, block_size: int, limits: SchedulerLimits) -> Admission:
    """Return an admission that lets the row continue in the same slot from another state, behind the blocks that it
    has."""
    finite = rows.finite[request.row_slot]
    admission = begin_row(rows, request, block_size, limits)
    if not finite:
        rows.not_finite(request.row_slot)
    return admission


def words_of(request: Request, prefix: int, block_size: int, limits: SchedulerLimits) -> int:
    """Return an upper bound on the words of the record of a request with `prefix` cached blocks."""
    counts = 0
    if request.sampling.has_penalty:  # as if no token were repeated
        counts = min(request.prompt_ids.size + request.tokens.size - request.prompt.size, limits.vocab_size)
    history = prefix * block_size if limits.history else 0
    return record_words(
        request.sampling, request.stopping, limits.eos_token_ids, blocks=prefix, counts=counts, history=history
    )


def _counts_of(request: Request) -> NDArray[np.int32]:
    """Return the token counts of a row with penalties."""
    if not request.sampling.has_penalty:
        return NO_COUNTS
    return penalty_list(request.prompt_ids, request.tokens[request.prompt.size :])


def _sampling_of(request: Request) -> SamplingParams:
    """Return the device's sampling parameters. Log-probabilities of the prompt that were already sent are not computed
    again."""
    if request.sampling.prompt_logprobs < 0 or request.wants_prompt_logprobs:
        return request.sampling
    return msgspec.structs.replace(request.sampling, prompt_logprobs=-1)
