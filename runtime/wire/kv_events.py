"""Changes of the engine's prefix cache, for front ends that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from runahead.runtime.wire.block_keys import KEY_BYTES
from runahead.runtime.wire.frames import ProtocolError

STORED: Final = 1
SNAPSHOT: Final = 2


class KvChange(NamedTuple):
    """A block, or the snapshot of the recurrent state after it, became findable or was forgotten.

    key: the block's, SHA-256 of `before` and its tokens. before: the previous block's key; empty unless `is_stored`.
    tokens: its ids, int32 bytes; empty unless `is_stored`, and for a snapshot.
    """

    is_stored: bool
    is_snapshot: bool
    key: bytes
    before: bytes = b""
    tokens: bytes = b""


class KvQuery(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Ask for changes of the prefix cache since this front end's last question. The answer waits for a change."""

    call: int


class KvReply(msgspec.Struct, frozen=True, array_like=True, tag=112):
    """The next changes of the empty salt, in order.

    cleared: forget everything: the whole content follows in this reply and the next ones, together with new changes, so
    a block may occur twice. is_whole: the whole content has been sent. kinds: uint8 [n], STORED and SNAPSHOT. keys: 32
    bytes each [n]. befores: 32 bytes for each stored one. tokens: int32 ids of each stored block, equally many for
    each.
    """

    call: int
    cleared: bool
    is_whole: bool
    kinds: bytes
    keys: bytes
    befores: bytes
    tokens: bytes


def kv_reply(call: int, cleared: bool, is_whole: bool, changes: Iterable[KvChange]) -> KvReply:
    """Convert changes to columns."""
    kinds, keys, befores, tokens = bytearray(), [], [], []
    for change in changes:
        kinds.append(STORED * change.is_stored + SNAPSHOT * change.is_snapshot)
        keys.append(change.key)
        if change.is_stored:
            befores.append(change.before)
            tokens.append(change.tokens)
    return KvReply(call, cleared, is_whole, bytes(kinds), b"".join(keys), b"".join(befores), b"".join(tokens))


def kv_changes(reply: KvReply, block_size: int) -> Iterator[KvChange]:
    """Convert columns to changes. Raises ProtocolError for inconsistent columns."""
    kinds, size = reply.kinds, 4 * block_size
    stored = sum(kind & STORED for kind in kinds)
    blocks = sum(kind == STORED for kind in kinds)
    lengths = len(reply.keys), len(reply.befores), len(reply.tokens)
    if lengths != (KEY_BYTES * len(kinds), KEY_BYTES * stored, size * blocks):
        raise ProtocolError(f"a reply of {len(kinds)} changes of the prefix cache has {lengths} bytes in its columns")
    key = before = token = 0
    for kind in kinds:
        is_stored, is_snapshot = bool(kind & STORED), bool(kind & SNAPSHOT)
        preceding, ids = b"", b""
        if is_stored:
            preceding = reply.befores[before : before + KEY_BYTES]
            before += KEY_BYTES
            if not is_snapshot:
                ids = reply.tokens[token : token + size]
                token += size
        yield KvChange(is_stored, is_snapshot, reply.keys[key : key + KEY_BYTES], preceding, ids)
        key += KEY_BYTES
