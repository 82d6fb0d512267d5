"""A prompt's message to the engine, with parts that front ends compute, so that the engine's loop hashes and sorts no
prompt.

A block's key is the SHA-256 of the previous key and its token ids. The first block's previous key is the salt, hashed
twice, so no salt can imitate a key and a block. Equal keys mean equal tokens at equal positions under the same salt.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

KEY_BYTES: Final = 32


class Content(NamedTuple):
    """A full block's content.

    key: of its tokens and all earlier ones. tokens: its ids, int32 bytes. before: the previous block's key.
    unsalted: its salt is empty.
    """

    key: bytes
    tokens: bytes
    before: bytes = b""
    unsalted: bool = False


def empty_prefix(salt: str) -> bytes:
    """Return the key before the first block of a request with this salt."""
    return sha256(sha256(salt.encode()).digest()).digest()


class PrefixKeys:
    """The keys of a request's full blocks, computed in order as its tokens become known.

    salt: only requests with the same salt share blocks. given: keys of the first blocks from `prompt_keys`, for
    lookups.
    """

    def __init__(self, salt: str, given: bytes = b"") -> None:
        self._keys = [empty_prefix(salt)]  # of the empty prefix, then of each block
        self._given = given
        self._unsalted = not salt

    def from_index(self, index: int) -> list[bytes]:
        """Return the known keys of blocks from this index on."""
        return self._keys[index + 1 :]

    def content(self, index: int, tokens: bytes) -> Content:
        """Return the content of the block at `index`. tokens: its ids, int32. Indexes come in order, possibly
        repeated.
        """
        before = self._keys[index]
        if index == len(self._keys) - 1:
            self._keys.append(sha256(before + tokens).digest())
        return Content(self._keys[index + 1], tokens, before, self._unsalted)

    def sought(self, index: int, tokens: bytes) -> Content:
        """Return the content for a lookup: under the given key of the block if its computed key is unknown."""
        given = self._given[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        if given and index == len(self._keys) - 1:
            return Content(given, tokens, self._keys[index], self._unsalted)
        return self.content(index, tokens)

    def found(self, index: int, content: Content) -> None:
        """Record that a lookup found this content, so the given key is right."""
        if index == len(self._keys) - 1:
            self._keys.append(content.key)


def prompt_keys(salt: str, prompt: NDArray[np.int32], block_size: int) -> bytes:
    """Return the consecutive keys of a prompt's full blocks. prompt: int32 [n]. Bytes [n // block_size * KEY_BYTES]"""
    tokens, size, keys = np.ascontiguousarray(prompt, "<i4").tobytes(), 4 * block_size, PrefixKeys(salt)
    for index in range(prompt.size // block_size):
        keys.content(index, tokens[index * size : (index + 1) * size])
    return b"".join(keys.from_index(0))


def prepared_submit(
    handle: int,
    request_id: str,
    prompt: NDArray[np.int32],
    sampling: SamplingParams,
    stopping: StoppingParams,
    *,
    block_size: int,
    cache_salt: str = "",
    **others: Any,
) -> m.Submit:
    """Make the message for a completion of `prompt`, int32 [n].

    block_size: of the engine's KV blocks if it has a prefix cache, else 0. others: further fields of `Submit`.
    """
    tokens = np.ascontiguousarray(prompt, np.dtype("<i4"))
    return m.Submit(
        handle,
        request_id,
        tokens.tobytes(),
        sampling,
        stopping,
        cache_salt=cache_salt,
        prompt_ids=_distinct(tokens).tobytes() if sampling.repetition_penalty != 1 else b"",
        block_keys=prompt_keys(cache_salt, tokens, block_size) if block_size else b"",
        **others,
    )


def _distinct(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return each id once, ascending."""
    ordered = np.sort(tokens)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if ordered.size else ordered
