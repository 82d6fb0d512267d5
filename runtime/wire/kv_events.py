"""Changes of the engine's prefix cache, for front ends that follow it."""

from __future__ import annotations

import msgspec


class KvChange(msgspec.Struct, frozen=True, array_like=True):
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
    a block may occur twice. is_whole: the whole content has been sent.
    """

    call: int
    cleared: bool
    is_whole: bool
    changes: tuple[KvChange, ...]
