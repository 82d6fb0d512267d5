"""Whether files have changed since they were read."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...]


def signature(*paths: Path) -> Signature:
    """Changes when one of the files is written to or replaced, by way of a link too. None for one that is not there."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
