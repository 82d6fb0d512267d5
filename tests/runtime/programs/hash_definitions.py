"""What the hash model adds to its tokens, written again from its definition with Python integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from runahead.runtime.wire.parameters import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def folded(total: int) -> int:
    return total ^ (total >> 32)


def hash_of(tokens: Sequence[int]) -> int:
    """The hash of a row's tokens, before its seed."""
    total = 0
    for place, token in enumerate(tokens, start=1):
        mixed = ((token + 1) * ((place * _GOLDEN & _MASK) | 1)) & _MASK
        total ^= mixed ^ (mixed >> 29)
    return folded(total)


def penalty_digest(prompt: Sequence[int], said: Sequence[int], sampling: SamplingParams) -> int:
    """What penalties fold into the hash of a row, whose completion is `said` so far. 0 without penalties."""
    if not sampling.has_penalty:
        return 0
    known = set(prompt) if sampling.repetition_penalty != 1 else set()
    total = 0
    for token in known | set(said):
        weight = ((token + 1) * _GOLDEN & _MASK) | 1
        total += (2 * list(said).count(token) + (token in known)) * weight
    total &= _MASK
    factors = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    for place, factor in enumerate(factors):
        total ^= struct.unpack("<I", struct.pack("<f", factor))[0] << (8 * place + 1)
    return folded(total)


def prompt_logprob(prompt: Sequence[int], index: int) -> float:
    """The made-up log-probability of prompt[index], from 1 on, given what is before it."""
    return ((hash_of(prompt[:index]) ^ (prompt[index] * _GOLDEN & _MASK)) % 4096) / -256


def prompt_top(prompt: Sequence[int], index: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The made-up `count` most likely tokens in the place of prompt[index]."""
    value = hash_of(prompt[:index])
    return [((value + rank & _MASK) % vocab_size, -float(value % 16 + rank)) for rank in range(count)]
