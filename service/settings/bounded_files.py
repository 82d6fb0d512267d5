"""Reads files named by users, up to a bound: an endless file is refused."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """A file can't be used. The message is the end of a sentence."""


def read_file(path: str, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises FileError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise FileError(error.strerror or str(error)) from error
    except ValueError as error:  # an invalid path
        raise FileError(str(error)) from error
    if len(data) > most:
        raise FileError(f"it has more than {most >> 20} MiB")
    return data


def read_text(path: str, most: int) -> str:
    """Read a file of at most `most` bytes of UTF-8. Raises FileError."""
    try:
        return read_file(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError("it is not UTF-8 text") from error
