"""The error of every checkpoint reader."""

from __future__ import annotations

from typing import Final

_MOST_CHARACTERS: Final = 2000
_KEPT: Final = (_MOST_CHARACTERS - 3) // 2  # of the beginning and of the end


class CheckpointError(ValueError):
    """A checkpoint that is not served. The sentence names the file, key or tensor, and what to do.

    It quotes files, so a long sentence is shortened in the middle.
    """

    def __init__(self, sentence: str) -> None:
        is_long = len(sentence) > _MOST_CHARACTERS
        super().__init__(f"{sentence[:_KEPT]} … {sentence[-_KEPT:]}" if is_long else sentence)
