"""What a row's slot must hold on the device before its first F, as a record for the bulk slot. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime import plan as layout
from runtime.request import SamplingParams, StoppingParams


def eos_and_stop_ids(stopping: StoppingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that end the row, each once: the model's end-of-sequence ids unless ignored, then the request's own."""
    eos = () if stopping.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*eos, *stopping.stop_token_ids)))


def needs_full(sampling: SamplingParams, stopping: StoppingParams) -> bool:
    """True if the row asks for more than greedy or temperature sampling."""
    filters = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
    masks = bool(sampling.bias_ids or sampling.allowed_token_ids or stopping.min_tokens)
    return filters or masks or sampling.logprobs >= 0


def _allowed_words(sampling: SamplingParams, vocab_size: int) -> int:
    return (vocab_size + 31) // 32 if sampling.allowed_token_ids else 0


def record_words(
    sampling: SamplingParams, stopping: StoppingParams, eos_token_ids: tuple[int, ...], vocab_size: int
) -> int:
    """Words of the record that `admission_record` makes."""
    stops = len(eos_and_stop_ids(stopping, eos_token_ids))
    return layout.ADMIT_WORDS + stops + 2 * len(sampling.bias_ids) + _allowed_words(sampling, vocab_size)


def allowed_mask(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
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
) -> NDArray[np.int32]:
    """The record of one admission, laid out as `runtime.plan` says. [record_words]"""
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
    parts = [
        head,
        np.asarray(stops, np.int32),
        np.asarray(sampling.bias_ids, np.int32),
        np.asarray(sampling.bias_values, np.float32).view(np.int32),
    ]
    if sampling.allowed_token_ids:
        parts.append(allowed_mask(sampling.allowed_token_ids, vocab_size))
    return np.concatenate(parts)
