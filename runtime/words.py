"""Named words of an int32 buffer that the host writes and a device reads: each is declared once, in a class.

    class Header(NamedTuple):
        number: Annotated[int, INT64]
        rows: Annotated[int, INT32]

    HEADER = WordLayout(Header, 16)

The order of the annotations is the order in the buffer. Whoever packs, reads or loads a word takes its place and its
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
    """The type of a field, for `Annotated`. code: what `struct` calls it. free: its value where nobody has set one."""

    code: str
    free: float = 0

    @property
    def size(self) -> int:
        """In words of 32 bits."""
        return struct.calcsize(f"<{self.code}") // 4

    def __call__(self, *, free: float) -> Word:
        """The same type with another value for what nobody has set."""
        return replace(self, free=free)


INT32: Final = Word("i")
FLOAT32: Final = Word("f")
INT64: Final = Word("q")  # two words, the lower half first; it begins at an even one

NUMPY_TYPES: Final[Mapping[str, type[np.generic]]] = {"i": np.int32, "f": np.float32, "q": np.int64}


class WordLayout:
    """Where the fields of `declaration` lie in a buffer of `words` words; those after the last field are 0.

    Raises TypeError where a field has no type, where the fields need more words, or where a field of 64 bits would
    begin at an odd word.
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
        """Of the fields, in their order."""
        return tuple(self.fields)

    def offset(self, name: str) -> int:
        """The word at which a field begins."""
        return self._places[name]

    def free(self) -> bytes:
        """A buffer in which nobody has set anything. 4 * words bytes."""
        return self.struct.pack(*(word.free for word in self.fields.values()))

    def columns(self, table: Any, types: Mapping[str, Any] = NUMPY_TYPES) -> dict[str, Any]:
        """Each field of all lines of `table`, int32 [lines, words] and contiguous, as a view [lines] of it.

        types: what the table's library calls the types, by the code of a `Word`. A NumPy array or a torch tensor.
        """
        return {
            name: table.view(types[word.code])[:, self._places[name] // word.size] for name, word in self.fields.items()
        }
