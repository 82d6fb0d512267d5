"""Files that a user names, read up to a bound: one that never ends is refused."""

from __future__ import annotations

from pathlib import Path


class TooLargeError(ValueError):
    """More than may be."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it has more than {most >> 20} MiB")


def read_file(path: str, most: int) -> bytes:
    """Raises OSError, ValueError for what can be no path, and TooLargeError beyond `most` bytes."""
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLargeError(most)
    return data
