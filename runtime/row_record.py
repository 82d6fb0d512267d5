"""Named words of an int32 buffer that the host writes and a device reads, and a row's record, declared only here.

A record is in the bulk slot of the launch that admits its row. It begins with a head of ADMIT_WORDS words, the fields
of `RowParameters`, followed by lists: stop ids, bias ids, bias values (float32 bits), words of the allowed-token mask,
blocks, penalty list, history. An admission copies the head into the row's line of `parameters`, int32 [slots,
ADMIT_WORDS].
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Generic, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.rounding import ceil_div

Column = TypeVar("Column")

ADMIT_WORDS: Final = 32

# Words of a penalty list entry: a token and its occurrences in the completion. Each token once, ids ascending.
COUNT_TOKEN: Final = 0
COUNT_SEEN: Final = 1  # occurrences, and PROMPT_BIT if the token is in the prompt
COUNT_WORDS: Final = 2
PROMPT_BIT: Final = 1 << 30


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

        class Header(NamedTuple):
            number: Annotated[int, INT64]
            rows: Annotated[int, INT32]

        HEADER = WordLayout(Header, 16)

    The order of the annotations is the order in the buffer. Code that packs, reads or loads a word takes its offset and
    type from the layout.

    Raises TypeError for a field without a type, too many words, or a 64-bit field at an odd word.
    """

    def __init__(self, declaration: type, words: int) -> None:
        self.words = words
        self.fields: dict[str, Word] = {}
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, hint in get_type_hints(declaration, include_extras=True).items():
            found = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Word)]
            if len(found) != 1:
                raise TypeError(f"{declaration.__name__}.{name} must be annotated with one word type")
            if offset % found[0].size:
                raise TypeError(f"{declaration.__name__}.{name} has 64 bits and would begin at the odd word {offset}")
            self.fields[name], self._offsets[name] = found[0], offset
            offset += found[0].size
        if offset > words:
            raise TypeError(f"{declaration.__name__} needs {offset} words and has {words}")
        codes = "".join(word.code for word in self.fields.values())
        self.struct = struct.Struct(f"<{codes}{4 * (words - offset)}x")

    @property
    def names(self) -> tuple[str, ...]:
        """The fields' names in order."""
        return tuple(self.fields)

    def offset(self, name: str) -> int:
        """Return a field's first word."""
        return self._offsets[name]

    def free(self) -> bytes:
        """Return a buffer with every default, 4 * words bytes."""
        return self.struct.pack(*(word.free for word in self.fields.values()))

    def columns(self, table: Any, types: Mapping[str, Any] = NUMPY_TYPES) -> dict[str, Any]:
        """Return each field of all lines of `table`, contiguous int32 [lines, words], as a view [lines].

        types: the table library's types by a `Word`'s code. A NumPy array or a torch tensor.
        """
        return {
            name: table.view(types[word.code])[:, self._offsets[name] // word.size]
            for name, word in self.fields.items()
        }


class RowParameters(Generic[Column]):
    """A row's parameters: the declaration, and columns [slots] by row slot.

    64-bit fields come first, so 32-bit fields can be added anywhere after them. The fields between `row_slot` and
    `min_position` are numbers of `runahead.runtime.wire.parameters.SamplingParams` with the same names.
    """

    seed: Annotated[Column, INT64]  # the request's 64-bit seed
    mask_epoch: Annotated[Column, INT64]  # in the tags of the row's masks; 0: no grammar
    row_slot: Annotated[Column, INT32]
    temperature: Annotated[Column, FLOAT32]  # 0: greedy
    top_k: Annotated[Column, INT32]  # 0: off
    top_p: Annotated[Column, FLOAT32(free=1)]  # 1: off
    min_p: Annotated[Column, FLOAT32]  # 0: off
    logprobs: Annotated[Column, INT32(free=-1)]  # -1: none; n >= 0: the chosen token's and the top n
    prompt_logprobs: Annotated[Column, INT32(free=-1)]  # the same for the tokens of the prompt
    repetition_penalty: Annotated[Column, FLOAT32(free=1)]  # 1: off
    presence_penalty: Annotated[Column, FLOAT32]  # 0: off
    frequency_penalty: Annotated[Column, FLOAT32]  # 0: off
    min_position: Annotated[Column, INT32]  # below it the stop ids are masked
    max_position: Annotated[Column, INT32]  # the row ends with the token at this position
    stop_count: Annotated[Column, INT32]  # stop ids
    bias_count: Annotated[Column, INT32]  # bias ids, and as many values; 0: no bias
    allowed_words: Annotated[Column, INT32]  # words of the allowed-token mask; 0: every token is allowed
    block_count: Annotated[Column, INT32]  # blocks at the beginning of the block table
    penalty_slot: Annotated[Column, INT32(free=-1)]  # where the row's tokens are counted; -1: no penalties
    penalty_entries: Annotated[Column, INT32]  # entries of the penalty list
    state_slot: Annotated[Column, INT32(free=-1)]  # -1: none
    history_count: Annotated[Column, INT32]  # tokens that no chunk brings, for a drafter that reads them
    begins_as: Annotated[Column, INT32]  # the snapshot for its initial state; 0: none


ROW_RECORD: Final = WordLayout(RowParameters, ADMIT_WORDS)

# Tensors of a device's rows, explained in `runahead.runtime.kernels.row_state`. `parameters` has the fields of
# `RowParameters`.
ROW_TENSORS: Final = (
    "last_token",
    "seq_len",
    "alive",
    "block_table",
    "parameters",
    "stop_ids",
    "bias_ids",
    "bias_values",
    "allowed",
)
PENALTY_TENSORS: Final = ("counts", "in_prompt")  # by penalty slot


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """An admission record, read back. Arrays are views of the bulk slot."""

    head: NDArray[np.int32]  # [ADMIT_WORDS]
    stop_ids: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int32]
    blocks: NDArray[np.int32]
    counts: NDArray[np.int32]  # [n, COUNT_WORDS] the penalty list
    history: NDArray[np.int32]  # the row's first tokens

    def word(self, name: str) -> int:
        """Return an integer of the head."""
        return int(self.head[ROW_RECORD.offset(name)])


_LIST_SIZES: Final = tuple(
    ROW_RECORD.offset(name) for name in ("stop_count", "bias_count", "bias_count", "allowed_words", "block_count")
)
_PENALTY_ENTRIES: Final = ROW_RECORD.offset("penalty_entries")
_HISTORY_COUNT: Final = ROW_RECORD.offset("history_count")


def read_admission(bulk: NDArray[np.int32], offset: int) -> AdmissionView:
    """Read the admission record at `offset` of a bulk slot."""
    head = bulk[offset : offset + ADMIT_WORDS]
    at = offset + ADMIT_WORDS
    lists: list[NDArray[np.int32]] = []
    for count in _LIST_SIZES:
        size = int(head[count])
        lists.append(bulk[at : at + size])
        at += size
    stop_ids, bias_ids, bias_values, allowed, blocks = lists
    entries = int(head[_PENALTY_ENTRIES])
    counts = bulk[at : at + entries * COUNT_WORDS].reshape(entries, COUNT_WORDS)
    at += entries * COUNT_WORDS
    history = bulk[at : at + int(head[_HISTORY_COUNT])]
    return AdmissionView(head, stop_ids, bias_ids, bias_values.view(np.float32), allowed, blocks, counts, history)


def signed_64(number: int) -> int:
    """Return the low 64 bits of a number as an int64."""
    low = number & 0xFFFFFFFFFFFFFFFF
    return low - (low >> 63 << 64)


def mask_words(vocab_size: int) -> int:
    """Return the 32-bit words of a mask over the vocabulary."""
    return ceil_div(vocab_size, 32)


def token_mask(token_ids: Sequence[int] | NDArray[np.integer[Any]], vocab_size: int) -> NDArray[np.int32]:
    """Make a mask: bit v % 32 of word v // 32 for token v. [mask_words(vocab_size)]"""
    said = np.zeros(32 * mask_words(vocab_size), np.bool_)
    said[np.asarray(token_ids, np.int64)] = True
    return np.packbits(said, bitorder="little").view("<i4")
