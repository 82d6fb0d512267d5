"""A request gets a row: the host's columns for it, and the record that tells the device."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.plan import Admission
from runahead.runtime.scheduler.admission_record import (
    NO_COUNTS,
    NO_HISTORY,
    admission_record,
    eos_and_stop_ids,
    needs_full,
    penalty_list,
    record_words,
)
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import Rows
from runahead.runtime.wire.parameters import SamplingParams


def begin_row(rows: Rows, request: Request, block_size: int, limits: SchedulerLimits) -> Admission:
    """Fill the columns of the row slot that the request has just got; its blocks, so far, are its cached prefix."""
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
    rows.token_times.begin(slot, request.last_token_s)
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
    """The row goes on in the same slot from another state, behind the blocks that it has: its record once more."""
    finite = rows.finite[request.row_slot]
    admission = begin_row(rows, request, block_size, limits)
    if not finite:
        rows.not_finite(request.row_slot)
    return admission


def words_of(request: Request, prefix: int, block_size: int, limits: SchedulerLimits) -> int:
    """Words of the record, at most, of a request that begins with so many cached blocks."""
    counts = 0
    if request.sampling.has_penalty:  # as if it had never said a token twice
        counts = min(request.prompt_ids.size + request.tokens.size - request.prompt.size, limits.vocab_size)
    history = prefix * block_size if limits.history else 0
    return record_words(
        request.sampling, request.stopping, limits.eos_token_ids, blocks=prefix, counts=counts, history=history
    )


def _counts_of(request: Request) -> NDArray[np.int32]:
    """What a row with penalties has said by now."""
    if not request.sampling.has_penalty:
        return NO_COUNTS
    return penalty_list(request.prompt_ids, request.tokens[request.prompt.size :])


def _sampling_of(request: Request) -> SamplingParams:
    """What the device is told: log-probabilities of the prompt that were sent are not wanted again."""
    if request.sampling.prompt_logprobs < 0 or request.wants_prompt_logprobs:
        return request.sampling
    return msgspec.structs.replace(request.sampling, prompt_logprobs=-1)
