"""What a row's slot must hold on the device before its first F, as a record for the bulk slot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runtime import plan as layout
from runtime.request import MAX_BIAS, MAX_STOP_IDS, SamplingParams, StoppingParams
from runtime.slot_pool import NO_SLOT

_NO_TOKENS: Final = np.zeros(0, np.int32)


def eos_and_stop_ids(stopping: StoppingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end the row, each once: the model's end-of-sequence ids unless ignored, then the request's own."""
    eos = () if stopping.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*eos, *stopping.stop_token_ids)))


def needs_full(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    """True if the row asks for more than greedy or temperature sampling."""
    if sampling.has_penalty:
        return True
    filters = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    masks = bool(sampling.bias_ids or sampling.allowed_token_ids or stopping.min_tokens)
    return filters or masks or sampling.logprobs >= 0


def _allowed_words(sampling: SamplingParams, vocab_size: int) -> int:
    return (vocab_size + 31) // 32 if sampling.allowed_token_ids else 0


def record_words(
    sampling: SamplingParams,
    stopping: StoppingParams,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    *,
    blocks: int = 0,
    tokens: NDArray[np.int32] | None = None,
) -> int:
    """Words of the record that `admission_record` makes, without making it.

    blocks: how many it names. tokens: as in `admission_record`; with penalties the result is an upper bound, as if
    every token were another one.
    """
    stops = len(eos_and_stop_ids(stopping, eos_token_ids))
    lists = stops + 2 * len(sampling.bias_ids) + _allowed_words(sampling, vocab_size) + blocks
    counts = min(_known(sampling, tokens).size, vocab_size)
    return layout.ADMIT_WORDS + lists + layout.COUNT_WORDS * counts


def largest_record_words(vocab_size: int, context_length: int, max_blocks: int) -> int:
    """Words of the largest record that any request can need."""
    lists = MAX_STOP_IDS + 2 * MAX_BIAS + (vocab_size + 31) // 32 + max_blocks
    return layout.ADMIT_WORDS + lists + layout.COUNT_WORDS * min(context_length, vocab_size)


def token_mask(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """A bit for each token of the vocabulary: bit v % 32 of word v // 32. [ceil(vocab / 32)]"""
    mask = np.zeros((vocab_size + 31) // 32, np.uint32)
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask.view(np.int32)


def admission_record(
    slot: int,
    sampling: SamplingParams,
    stopping: StoppingParams,
    prompt_len: int,
    max_len: int,
    eos_token_ids: tuple[int, ...],
    vocab_size: int,
    *,
    blocks: Sequence[int] = (),
    penalty_slot: int = NO_SLOT,
    state_slot: int = NO_SLOT,
    tokens: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """The record of one admission, laid out as `runtime.plan` says. [record_words at most]

    prompt_len: tokens of the original prompt, whatever else is known of the request by now.
    blocks: what the row's block table begins with: its cached prefix.
    tokens: int32 [known], with penalties only: the prompt, and what the request has said before it was evicted.
    Raises ValueError for penalties without a penalty slot or without tokens.
    """
    if sampling.has_penalty and penalty_slot < 0:
        raise ValueError("a request with penalties was admitted without a penalty slot")
    stops = eos_and_stop_ids(stopping, eos_token_ids)
    head = np.zeros(layout.ADMIT_WORDS, np.int32)
    seed = np.array([sampling.seed & 0xFFFFFFFF, (sampling.seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    head[layout.ADMIT_SLOT] = slot
    head[layout.ADMIT_TEMPERATURE] = layout.float_bits(sampling.temperature)
    head[layout.ADMIT_TOP_K] = sampling.top_k
    head[layout.ADMIT_TOP_P] = layout.float_bits(sampling.top_p)
    head[layout.ADMIT_MIN_P] = layout.float_bits(sampling.min_p)
    head[layout.ADMIT_SEED_LOW], head[layout.ADMIT_SEED_HIGH] = seed
    head[layout.ADMIT_LOGPROBS] = sampling.logprobs
    head[layout.ADMIT_MIN_POSITION] = prompt_len + stopping.min_tokens
    head[layout.ADMIT_MAX_POSITION] = max_len - 1
    head[layout.ADMIT_STOP_IDS] = len(stops)
    head[layout.ADMIT_BIAS] = len(sampling.bias_ids)
    head[layout.ADMIT_ALLOWED_WORDS] = _allowed_words(sampling, vocab_size)
    head[layout.ADMIT_BLOCKS] = len(blocks)
    head[layout.ADMIT_PROMPT_LOGPROBS] = sampling.prompt_logprobs
    head[layout.ADMIT_REPETITION] = layout.float_bits(sampling.repetition_penalty)
    head[layout.ADMIT_PRESENCE] = layout.float_bits(sampling.presence_penalty)
    head[layout.ADMIT_FREQUENCY] = layout.float_bits(sampling.frequency_penalty)
    head[layout.ADMIT_PENALTY_SLOT] = penalty_slot if sampling.has_penalty else NO_SLOT
    head[layout.ADMIT_STATE_SLOT] = state_slot
    counts = penalty_list(_known(sampling, tokens), prompt_len, sampling.repetition_penalty != 1)
    head[layout.ADMIT_COUNTS] = len(counts)
    parts = [
        head,
        np.asarray(stops, np.int32),
        np.asarray(sampling.bias_ids, np.int32),
        np.asarray(sampling.bias_values, np.float32).view(np.int32),
    ]
    if sampling.allowed_token_ids:
        parts.append(token_mask(sampling.allowed_token_ids, vocab_size))
    parts += [np.asarray(blocks, np.int32), counts.ravel()]
    return np.concatenate(parts)


def penalty_list(tokens: NDArray[np.int32], prompt_len: int, prompt_matters: bool) -> NDArray[np.int32]:
    """Which tokens a row has said, and how often: int32 [n, COUNT_WORDS], each token once, ids ascending.

    tokens: [known], the first `prompt_len` of them the prompt's, which only a repetition penalty looks at.
    """
    said, times = np.unique(tokens[prompt_len:], return_counts=True)
    ids = np.union1d(said, tokens[:prompt_len]) if prompt_matters else said
    seen = np.zeros(ids.size, np.int32)
    seen[np.searchsorted(ids, said)] = times
    if prompt_matters:
        seen[np.isin(ids, tokens[:prompt_len])] |= layout.PROMPT_BIT
    return np.stack([ids.astype(np.int32), seen], axis=1)


def _known(sampling: SamplingParams, tokens: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """The tokens that penalties are counted from: none without penalties."""
    if not sampling.has_penalty:
        return _NO_TOKENS
    if tokens is None:
        raise ValueError("a request with penalties was admitted without its tokens")
    return tokens
