"""Keys of KV blocks by content: what a front end sends of its prompt's blocks, so that the engine hashes no prompt.

A block's key is the SHA-256 of the key before it and its own token ids. Before the first stands the salt, hashed twice:
no salt can be chosen so that it stands for a key and a block. Equal keys mean the same tokens at the same positions
under the same salt.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 32


def salt_key(salt: str) -> bytes:
    """The key of the empty prefix. [KEY_BYTES]"""
    return sha256(sha256(salt.encode()).digest()).digest()


def block_key(before: bytes, tokens: bytes) -> bytes:
    """The key of the block that holds these ids, int32, behind the one whose key is `before`. [KEY_BYTES]"""
    return sha256(before + tokens).digest()


def prompt_keys(salt: str, prompt: NDArray[np.int32], block_size: int) -> bytes:
    """Keys of a prompt's full blocks, one after the other. prompt: int32 [n]. Bytes [n // block_size * KEY_BYTES]"""
    tokens, size = np.ascontiguousarray(prompt, "<i4").tobytes(), 4 * block_size
    key, keys = salt_key(salt), []
    for begin in range(0, len(tokens) // size * size, size):
        key = block_key(key, tokens[begin : begin + size])
        keys.append(key)
    return b"".join(keys)
