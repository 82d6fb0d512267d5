"""Keys of KV blocks by content: what a front end sends of its prompt's blocks, so that the engine hashes no prompt.

A block's key is the SHA-256 of the key before it and its own token ids. Before the first stands the salt, hashed twice:
no salt can be chosen so that it stands for a key and a block. Equal keys mean the same tokens at the same positions
under the same salt.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 32


class Content(NamedTuple):
    """What a full block holds.

    key: of its tokens and all before them. tokens: its own ids, int32 bytes. before: the key of what comes before it.
    unsalted: its salt is empty.
    """

    key: bytes
    tokens: bytes
    before: bytes = b""
    unsalted: bool = False


def empty_prefix(salt: str) -> bytes:
    """The key before the first block of a request with this salt."""
    return sha256(sha256(salt.encode()).digest()).digest()


class PrefixKeys:
    """The keys of one request's full blocks, made in order as its tokens become known.

    salt: only requests of the same salt share blocks. given: keys of the first blocks, as `prompt_keys` makes them, to
    look them up by.
    """

    def __init__(self, salt: str, given: bytes = b"") -> None:
        self._keys = [empty_prefix(salt)]  # of the empty prefix, then of each block
        self._given = given
        self._unsalted = not salt

    def from_index(self, index: int) -> list[bytes]:
        """Keys of blocks from this index on, as far as they were made."""
        return self._keys[index + 1 :]

    def content(self, place: int, tokens: bytes) -> Content:
        """What the block at `place` holds. tokens: its own ids, int32. Places come in order, and may come again."""
        before = self._keys[place]
        if place == len(self._keys) - 1:
            self._keys.append(sha256(before + tokens).digest())
        return Content(self._keys[place + 1], tokens, before, self._unsalted)

    def sought(self, place: int, tokens: bytes) -> Content:
        """As `content`, to look for: under the key that was given for the block, if its own is not known."""
        given = self._given[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        if given and place == len(self._keys) - 1:
            return Content(given, tokens, self._keys[place], self._unsalted)
        return self.content(place, tokens)

    def found(self, place: int, content: Content) -> None:
        """A block is there with the content that was sought: the key that was given for it is right."""
        if place == len(self._keys) - 1:
            self._keys.append(content.key)


def prompt_keys(salt: str, prompt: NDArray[np.int32], block_size: int) -> bytes:
    """Keys of a prompt's full blocks, one after the other. prompt: int32 [n]. Bytes [n // block_size * KEY_BYTES]"""
    tokens, size, keys = np.ascontiguousarray(prompt, "<i4").tobytes(), 4 * block_size, PrefixKeys(salt)
    for place in range(prompt.size // block_size):
        keys.content(place, tokens[place * size : (place + 1) * size])
    return b"".join(keys.from_index(0))
