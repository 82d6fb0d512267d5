"""The launch plan: the changes on the device with one launch, as a flat int32 buffer of absolute values.

A plan slot holds a 64-byte header and, only where something changed, a body:

    header | row list [rows] | appends [n, 3] | chunks [n, 5] | admission offsets [n]

Prompt tokens and admission records are in the bulk slot of the same launch; only mixed launches have any. In steady
decode the plan is its header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.runtime.row_record import INT32, INT64, WordLayout

HEADER_WORDS: Final = 16


class PlanHeader(NamedTuple):
    """The header of a plan slot."""

    # The launch's shape, which `shape_of` reads.
    number: Annotated[int, INT64]  # the launch that the plan is for
    sample_rows: Annotated[int, INT32]  # rows that S reads
    needs_full: Annotated[int, INT32]  # S's form: 0, plain; 1, full; 2, full with masks
    rows: Annotated[int, INT32]  # rows of F
    tokens: Annotated[int, INT32]  # most query tokens of F, as if each decoding row had `drafts`
    is_decode: Annotated[int, INT32]  # 1: every row of F has the query tokens of a decoding row
    prompt_logprobs: Annotated[int, INT32]  # 1: a chunk leaves log-probabilities of its prompt
    drafts: Annotated[int, INT32]  # query tokens of a decoding row beside its newest token
    sample_drafts: Annotated[int, INT32]  # the same for the previous F, which S verifies
    # The plan's body.
    row_list: Annotated[int, INT32]  # 1: the row list follows; 0: the previous rows, each one token further
    appends: Annotated[int, INT32]
    chunks: Annotated[int, INT32]
    admissions: Annotated[int, INT32]
    bulk_words: Annotated[int, INT32]  # words used in the bulk slot
    guesses: Annotated[int, INT32]  # of `drafts`, the drafter's; only a grammar forces others


HEADER: Final = WordLayout(PlanHeader, HEADER_WORDS)
_pack_header: Final = HEADER.struct.pack_into
_unpack_header: Final = HEADER.struct.unpack_from
_PLAIN, _FULL = Form.PLAIN, Form.FULL  # members of an enum are looked up slowly

# Words of an append: block_table[slot, index] = block.
APPEND_WORDS: Final = 3

# Words of a chunk: a row with its own query tokens, from the bulk slot.
CHUNK_ROW: Final = 0  # its index in the row list
CHUNK_START: Final = 1  # position of its first query token
CHUNK_TOKENS: Final = 2
CHUNK_OFFSET: Final = 3  # index of its first token id in the bulk slot
CHUNK_SAMPLES: Final = 4  # 1: its last token is the row's last known one, so the next S samples the row
CHUNK_WORDS: Final = 5
# If the row wants prompt log-probabilities and the chunk is not its last, one more token id follows the chunk's
# tokens in the bulk slot: the prompt's next.

PLAN_WORDS: Final = 2048  # 8 KiB; the rest waits for the next launch


@dataclass(frozen=True, slots=True)
class Admission:
    """A row's parameters for the device: everything that its slot needs before its first F."""

    slot: int
    words: NDArray[np.int32]  # the record and its lists, as `runahead.runtime.row_record` lays them out

    @property
    def size(self) -> int:
        """Words in the bulk slot."""
        return int(self.words.size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one row.

    target: the prompt's next token, if the chunk's last query token must leave its log-probability; else -1.
    """

    slot: int
    start: int
    tokens: NDArray[np.int32]  # [n]
    samples: bool
    target: int = -1

    @property
    def words(self) -> int:
        """Words in the bulk slot."""
        return int(self.tokens.size) + (self.target >= 0)


class LaunchPlan(NamedTuple):
    """One launch's plan, before it is staged.

    rows: row slots of F, ascending. chunks: rows with prompt tokens. tokens: query tokens of F, as if each decoding row
    had `drafts`. sample_rows: rows that S reads. needs_full, masked: some sampled row needs the full form; has a
    grammar. is_decode: every row of F has the query tokens of a decoding row. prompt_logprobs: a chunk leaves
    log-probabilities of its prompt. drafts, sample_drafts: most drafts of a decoding row in this F, and in the previous
    F. guesses: of this F's drafts, the drafter's; only a grammar forces others.
    """

    number: int
    rows: NDArray[np.int32]  # [rows]
    samples: NDArray[np.bool_]  # [rows] the next launch samples this row
    row_list_changed: bool
    appends: NDArray[np.int32]  # [n, 3] (slot, index, block)
    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    tokens: int = 0
    sample_rows: int = 0
    needs_full: bool = False
    is_decode: bool = False
    prompt_logprobs: bool = False
    drafts: int = 0
    sample_drafts: int = 0
    guesses: int = 0
    masked: bool = False


def stage(plan: LaunchPlan, body: NDArray[np.int32], bulk: NDArray[np.int32]) -> None:
    """Write a plan into its staging slot: `body` [plan_words] and `bulk` [bulk_words].

    Raises OverflowError if the plan is larger than its slot; the scheduler never makes such a plan.
    """
    rows = plan.rows.size if plan.row_list_changed else 0
    appends, chunks, admissions = len(plan.appends), len(plan.chunks), len(plan.admissions)
    end = HEADER_WORDS + rows + appends * APPEND_WORDS + chunks * CHUNK_WORDS + admissions
    bulk_words = sum(c.words for c in plan.chunks) + sum(a.size for a in plan.admissions) if chunks or admissions else 0
    if end > body.size or bulk_words > bulk.size:
        raise OverflowError(f"plan {plan.number} needs {end} + {bulk_words} words of {body.size} + {bulk.size}")
    _pack_header(  # the fields of `PlanHeader`, which would take longer to make than the rest
        body.data,
        0,
        plan.number,
        plan.sample_rows,
        plan.needs_full + plan.masked,
        plan.rows.size,
        plan.tokens,
        plan.is_decode,
        plan.prompt_logprobs,
        plan.drafts,
        plan.sample_drafts,
        plan.row_list_changed,
        appends,
        chunks,
        admissions,
        bulk_words,
        plan.guesses,
    )
    at = HEADER_WORDS
    if rows:
        body[at : at + rows] = plan.rows
        at += rows
    if appends:
        body[at : at + appends * APPEND_WORDS] = plan.appends.ravel()
        at += appends * APPEND_WORDS
    used = 0
    for chunk in plan.chunks:
        row = plan.rows.searchsorted(chunk.slot)
        size = chunk.tokens.size
        body[at : at + CHUNK_WORDS] = (row, chunk.start, size, used, chunk.samples)
        bulk[used : used + size] = chunk.tokens
        if chunk.target >= 0:
            bulk[used + size] = chunk.target
        at += CHUNK_WORDS
        used += chunk.words
    for admission in plan.admissions:
        body[at] = used
        bulk[used : used + admission.size] = admission.words
        at += 1
        used += admission.size


@dataclass(frozen=True, slots=True)
class PlanView:
    """A staged plan, read back. Arrays are views of the staging slot."""

    number: int
    num_rows: int
    tokens: int
    drafts: int
    sample_drafts: int
    guesses: int
    bulk_words: int
    rows: NDArray[np.int32] | None  # [rows], None: unchanged
    appends: NDArray[np.int32]  # [n, 3]
    chunks: NDArray[np.int32]  # [n, CHUNK_WORDS]
    admissions: NDArray[np.int32]  # [n] offsets into the bulk slot
    words: int  # of the plan slot, including the header

    @property
    def bytes_read(self) -> int:
        """Bytes that a device copies to read this plan."""
        return 4 * (self.words + self.bulk_words)


def read_plan(body: NDArray[np.int32]) -> PlanView:
    """Return the plan in a staging slot."""
    header = PlanHeader._make(HEADER.struct.unpack_from(body.data))
    at = HEADER_WORDS
    rows = body[at : at + header.rows] if header.row_list else None
    at += header.rows if header.row_list else 0
    append_end = at + header.appends * APPEND_WORDS
    chunk_end = append_end + header.chunks * CHUNK_WORDS
    end = chunk_end + header.admissions
    return PlanView(
        number=header.number,
        num_rows=header.rows,
        tokens=header.tokens,
        drafts=header.drafts,
        sample_drafts=header.sample_drafts,
        guesses=header.guesses,
        bulk_words=header.bulk_words,
        rows=rows,
        appends=body[at:append_end].reshape(header.appends, APPEND_WORDS),
        chunks=body[append_end:chunk_end].reshape(header.chunks, CHUNK_WORDS),
        admissions=body[chunk_end:end],
        words=end,
    )


def shape_of(body: NDArray[np.int32]) -> LaunchShape:
    """Return the shape of the launch whose plan is in this staging slot, int32 [plan_words]. The engine calls this too,
    so that a process with only the plan's bytes enqueues the same launch."""
    number, sample_rows, needs_full, rows, tokens, is_decode, prompt_logprobs, drafts, sample_drafts, *_, guesses = (
        _unpack_header(body.data)
    )
    form = _FULL if needs_full else _PLAIN
    return LaunchShape(
        number, sample_rows, form, rows, tokens, is_decode == 1, prompt_logprobs == 1, drafts, sample_drafts,
        needs_full == 2, drafts > guesses == 0,
    )  # fmt: skip
