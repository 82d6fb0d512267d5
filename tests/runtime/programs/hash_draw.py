"""How the hash model draws a token. Everything that S may look at beside the logits has a say in it, so that a wrong
seed, a stale mask, a form that forgets something or a neighbour's parameters change the tokens.

The logits of a row are one number of 64 bits, its digest. With a temperature over 0 the seed is folded in, and where
the temperature is not 1 or a filter is on, those and the position. The form `full` alone folds in the filters, what a
penalty slot holds, and the bias. The token is candidate `digest % n` of the n allowed ones, ids ascending; below
`min_position` it is the next one, in a circle, that does not stop the row, or the lowest if all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.reference.sampling_filters import bits
from runahead.runtime.programs.cpu.rows import HostRows

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_ONE: Final = 0x3F800000  # the bits of 1.0
_STEPS: Final = np.uint64(_GOLDEN)


def is_steered(rows: HostRows, slots: NDArray[np.int64], form: Form) -> NDArray[np.bool_]:
    """Which rows, [n], anything but their seed has a say in: the token of the others is (digest ^ seed) % vocab."""
    steered: NDArray[np.bool_] = rows.temperature[slots] != 1
    if form is Form.FULL:
        steered |= (rows.top_k[slots] > 0) | (rows.top_p[slots] != 1) | (rows.min_p[slots] > 0)
        steered |= (rows.penalty_slot[slots] >= 0) | (rows.bias_count[slots] > 0) | (rows.allowed_words[slots] > 0)
        steered |= rows.seq_len[slots] < rows.min_position[slots]
    return steered


def draw(
    rows: HostRows, slot: int, digest: int, position: int, form: Form, mask: NDArray[np.int32] | None = None
) -> int:
    """The token at this position of the row in this slot. mask: what its grammar allows. -1: nothing is left."""
    if rows.temperature[slot] > 0:  # a greedy row looks neither at its seed nor at its filters
        digest ^= int(rows.seed[slot]) & _MASK ^ _filters(rows, slot, position, form)
    if form is Form.PLAIN:
        return digest % rows.vocab_size
    if rows.penalty_slot[slot] >= 0:
        digest ^= _penalties(rows, slot)
    if rows.bias_count[slot]:
        digest ^= _bias(rows, slot)
    is_early = position < rows.min_position[slot]
    if not (is_early or rows.allowed_words[slot] or mask is not None):
        return digest % rows.vocab_size
    return _of_allowed(rows, slot, digest, is_early, mask)


def _of_allowed(rows: HostRows, slot: int, digest: int, is_early: bool, mask: NDArray[np.int32] | None) -> int:
    may = np.ones(rows.vocab_size, np.bool_)
    if rows.allowed_words[slot]:
        may &= bits(rows.allowed[slot], rows.vocab_size)
    if mask is not None:
        may &= bits(mask, rows.vocab_size)
    allowed = np.flatnonzero(may).tolist()
    if not allowed:
        return -1
    first = digest % len(allowed)
    if not is_early:
        return allowed[first]
    stops = set(rows.stop_ids[slot].tolist())
    circle = allowed[first:] + allowed[:first]
    return next((token for token in circle if token not in stops), allowed[0])


def _filters(rows: HostRows, slot: int, position: int, form: Form) -> int:
    """0 for a row of temperature 1 without filters."""
    words = [_bits(rows.temperature[slot]) ^ _ONE]
    if form is Form.FULL:
        words += [int(rows.top_k[slot]), _bits(rows.top_p[slot]) ^ _ONE, _bits(rows.min_p[slot])]
    return _folded(words) ^ (position * _GOLDEN & _MASK) if any(words) else 0


def _bias(rows: HostRows, slot: int) -> int:
    count = rows.bias_count[slot]
    ids, values = rows.bias_ids[slot, :count].tolist(), rows.bias_values[slot, :count]
    return _folded(word for token, value in zip(ids, values, strict=True) for word in (token + 1, _bits(value)))


def _penalties(rows: HostRows, slot: int) -> int:
    """What the row has said as its penalty slot holds it, and its factors."""
    penalty_slot = int(rows.penalty_slot[slot])
    said = rows.counts[penalty_slot].astype(np.uint64) * np.uint64(2)
    said += bits(rows.in_prompt[penalty_slot], rows.vocab_size)
    weights = np.arange(1, rows.vocab_size + 1, dtype=np.uint64) * _STEPS | np.uint64(1)
    total = int((said * weights).sum(dtype=np.uint64))
    for place, factor in enumerate((rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)):
        total ^= _bits(factor[slot]) << (8 * place + 1)
    return total ^ (total >> 32)


def _folded(words: Iterable[int]) -> int:
    """64 bits of a list of numbers and their places."""
    total = 0
    for place, word in enumerate(words, start=1):
        total ^= (word & _MASK) * (place * _GOLDEN & _MASK | 1) & _MASK
    return total ^ (total >> 32)


def _bits(value: np.float32) -> int:
    return int(value.view(np.uint32))
