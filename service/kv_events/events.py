"""Events of the prefix cache for routers, independent of the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from runahead.runtime.wire.block_keys import empty_prefix
from runahead.runtime.wire.messages import EngineInfo

MOST_EVENTS: Final = 512  # in a batch
KIND: Final = "full_attention"  # routers' name of a cache that keeps every token of a prefix
MEDIUM: Final = "GPU"  # routers' name of device memory, also on a CPU
_ROOT: Final = empty_prefix("")


class Stored(NamedTuple):
    """A block can be found. key, before: of the block and of its predecessor. tokens: its ids, int32 bytes."""

    key: bytes
    before: bytes
    tokens: bytes

    @property
    def parent(self) -> bytes | None:
        """The predecessor's key, None for a prompt's first block."""
        return None if self.before == _ROOT else self.before

    @property
    def ids(self) -> list[int]:
        """Return the block's token ids."""
        ids: list[int] = np.frombuffer(self.tokens, "<i4").tolist()
        return ids


class Removed(NamedTuple):
    """A block can't be found any more."""

    key: bytes


class Cleared(NamedTuple):
    """No block can be found."""


Event = Stored | Removed | Cleared


def batches(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split events into batches of at most MOST_EVENTS, in order."""
    left = iter(events)
    while batch := list(islice(left, MOST_EVENTS)):
        yield batch


def runs(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Split events into those that can share a message: stored blocks that form a chain, and consecutive removed
    blocks.
    """
    run: list[Event] = []
    for event in events:
        if run and not _goes_on(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def sliding_window(info: EngineInfo) -> int | None:
    """Return the window in tokens if every attention layer has the same one, else None."""
    windows = {layer.window for layer in info.layers if layer.mixer == "attention"}
    return (windows.pop() or None) if len(windows) == 1 else None


def _goes_on(last: Event, event: Event) -> bool:
    if isinstance(event, Stored):
        return isinstance(last, Stored) and event.before == last.key
    return isinstance(event, Removed) and isinstance(last, Removed)
