"""Named words of an int32 buffer that the host writes and a device reads, declared once in a class.

    class Header(NamedTuple):
        number: Annotated[int, INT64]
        rows: Annotated[int, INT32]

    HEADER = WordLayout(Header, 16)

The order of the annotations is the order in the buffer. Code that packs, reads or loads a word takes its offset and
type from the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_type_hints

import numpy as np


@dataclass(frozen=True, slots=True)
class Word:
    """A field's type, for `Annotated`. code: the `struct` format character. free: its default."""

    code: str
    free: float = 0

    @property
    def size(self) -> int:
        """The size in 32-bit words."""
        return struct.calcsize(f"<{self.code}") // 4

    def __call__(self, *, free: float) -> Word:
        """Return the same type with another default."""
        return replace(self, free=free)


INT32: Final = Word("i")
FLOAT32: Final = Word("f")
INT64: Final = Word("q")  # two words, the low half first; begins at an even word

NUMPY_TYPES: Final[Mapping[str, type[np.generic]]] = {"i": np.int32, "f": np.float32, "q": np.int64}


class WordLayout:
    """The layout of `declaration`'s fields in a buffer of `words` words; those after the last field are 0.

    Raises TypeError for a field without a type, too many words, or a 64-bit field at an odd word.
    """

    def __init__(self, declaration: type, words: int) -> None:
        self.words = words
        self.fields: dict[str, Word] = {}
        self._places: dict[str, int] = {}
        place = 0
        for name, hint in get_type_hints(declaration, include_extras=True).items():
            found = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Word)]
            if len(found) != 1:
                raise TypeError(f"{declaration.__name__}.{name} must be annotated with one word type")
            if place % found[0].size:
                raise TypeError(f"{declaration.__name__}.{name} has 64 bits and would begin at the odd word {place}")
            self.fields[name], self._places[name] = found[0], place
            place += found[0].size
        if place > words:
            raise TypeError(f"{declaration.__name__} needs {place} words and has {words}")
        codes = "".join(word.code for word in self.fields.values())
        self.struct = struct.Struct(f"<{codes}{4 * (words - place)}x")

    @property
    def names(self) -> tuple[str, ...]:
        """The fields' names in order."""
        return tuple(self.fields)

    def offset(self, name: str) -> int:
        """Return a field's first word."""
        return self._places[name]

    def free(self) -> bytes:
        """Return a buffer with every default, 4 * words bytes."""
        return self.struct.pack(*(word.free for word in self.fields.values()))

    def columns(self, table: Any, types: Mapping[str, Any] = NUMPY_TYPES) -> dict[str, Any]:
        """Return each field of all lines of `table`, contiguous int32 [lines, words], as a view [lines].

        types: the table library's types by a `Word`'s code. A NumPy array or a torch tensor.
        """
        return {
            name: table.view(types[word.code])[:, self._places[name] // word.size] for name, word in self.fields.items()
        }
