"""A worker's side: it reads its orders, then questions, from standard input and answers each with one line."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from runahead.runtime.parent_death import signal_at_parents_death

_STATM: Final = Path("/proc/self/statm")
_DATA: Final = 5  # its field of what `RLIMIT_DATA` bounds, in pages

T = TypeVar("T")


class Ready(msgspec.Struct, frozen=True):
    """The answer to a worker's orders. unusable: why it can never answer, empty if it can. warning: missing
    confinement, empty if complete.
    """

    unusable: str = ""
    warning: str = ""


def read_orders(kind: type[T]) -> T:
    """Return the first line. From here on this process ends with its parent."""
    signal_at_parents_death()
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def data_bytes() -> int:
    """Return the bytes that `RLIMIT_DATA` limits; 0 if the system reports and limits none."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[_DATA]) * resource.getpagesize()
    except OSError:
        return 0
