"""How the hash model draws, written again from its definition with Python integers."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tests.simulation.script import Ask

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def drawn(
    ask: Ask, digest: int, position: int, said: Counter[int], masked: Collection[int], allowed: Sequence[int]
) -> int:
    """The token at this position. digest: of all tokens before it. said: its completion. masked: ids that may not come,
    as long as the allowed ones leave another. allowed: ids that may come, ascending, one at least."""
    if ask.temperature > 0:
        digest ^= ask.seed & _MASK
        filters = [_bits(ask.temperature) ^ _bits(1.0), ask.top_k, _bits(ask.top_p) ^ _bits(1.0), _bits(ask.min_p)]
        if any(filters):
            digest ^= _folded(filters) ^ (position * _GOLDEN & _MASK)
    if ask.sampling.has_penalty:
        digest ^= _penalties(ask, said)
    if ask.bias:
        digest ^= _folded(word for token, value in ask.bias for word in (token + 1, _bits(value)))
    for step in range(len(allowed)):
        token = allowed[(digest % len(allowed) + step) % len(allowed)]
        if token not in masked:
            return token
    return allowed[0]


def _penalties(ask: Ask, said: Counter[int]) -> int:
    """A digest of which tokens were said, how often, and of the three factors."""
    in_prompt = set(ask.prompt) if ask.repetition != 1 else set()
    total = 0
    for token in {*said, *in_prompt}:
        total += (2 * said[token] + (token in in_prompt)) * (((token + 1) * _GOLDEN & _MASK) | 1)
    total &= _MASK
    for place, factor in enumerate((ask.repetition, ask.presence, ask.frequency)):
        total ^= _bits(factor) << (8 * place + 1)
    return total ^ (total >> 32)


def _folded(words: Iterable[int]) -> int:
    total = 0
    for place, word in enumerate(words, start=1):
        total ^= word * (place * _GOLDEN & _MASK | 1) & _MASK
    return total ^ (total >> 32)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")
