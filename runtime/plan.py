"""The launch plan: what changes on the device with one launch, as a flat int32 buffer of absolute values.

A plan slot holds a 64-byte header and, only where something changed, a body:

    header | row list [rows] | appends [n, 3] | chunks [n, 5] | admission offsets [n]

Prompt tokens and admission records lie in the bulk slot of the same launch; only mixed launches have any. In a steady
decode nothing follows the header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Words of the header.
NUMBER: Final = 0  # the launch that the plan is for: the low half of its 64 bits, which begin the plan slot
NUMBER_HIGH: Final = 1  # the high half
ROWS: Final = 2  # rows of F
TOKENS: Final = 3  # query tokens of F
ROW_LIST: Final = 4  # 1: the row list follows; 0: the rows are those of the plan before, each one token further
APPENDS: Final = 5
CHUNKS: Final = 6
ADMISSIONS: Final = 7
BULK_WORDS: Final = 8  # words used in the bulk slot
HEADER_WORDS: Final = 16
_HEADER: Final = struct.Struct(f"<q{BULK_WORDS - NUMBER_HIGH}i{4 * (HEADER_WORDS - BULK_WORDS - 1)}x")  # the rest is 0

# Words of an append: block_table[slot, index] = block.
APPEND_WORDS: Final = 3

# Words of a chunk: a row with its own query tokens, from the bulk slot.
CHUNK_ROW: Final = 0  # its place in the row list
CHUNK_START: Final = 1  # position of its first query token
CHUNK_TOKENS: Final = 2
CHUNK_OFFSET: Final = 3  # where its token ids begin in the bulk slot
CHUNK_SAMPLES: Final = 4  # 1: its last token ends what is known of the row, the next S samples it
CHUNK_WORDS: Final = 5
# Where the row asked for prompt log-probabilities and the chunk is not its last, one more token id follows the chunk's
# own in the bulk slot: the prompt's next.

# Words of an admission record, in the bulk slot. Lists follow in this order: stop ids, bias ids, bias values (float32
# bits), words of the allowed-token mask, blocks, penalty list.
ADMIT_SLOT: Final = 0
ADMIT_TEMPERATURE: Final = 1  # float32 bits, as top_p and min_p
ADMIT_TOP_K: Final = 2
ADMIT_TOP_P: Final = 3
ADMIT_MIN_P: Final = 4
ADMIT_SEED_LOW: Final = 5
ADMIT_SEED_HIGH: Final = 6
ADMIT_LOGPROBS: Final = 7
ADMIT_MIN_POSITION: Final = 8
ADMIT_MAX_POSITION: Final = 9
ADMIT_STOP_IDS: Final = 10  # how many of each list
ADMIT_BIAS: Final = 11
ADMIT_ALLOWED_WORDS: Final = 12
ADMIT_BLOCKS: Final = 13
ADMIT_PROMPT_LOGPROBS: Final = 14
ADMIT_REPETITION: Final = 15  # float32 bits, as presence and frequency
ADMIT_PRESENCE: Final = 16
ADMIT_FREQUENCY: Final = 17
ADMIT_PENALTY_SLOT: Final = 18  # -1: none
ADMIT_COUNTS: Final = 19  # entries of the penalty list
ADMIT_STATE_SLOT: Final = 20  # -1: none
ADMIT_WORDS: Final = 32

# Words of an entry of the penalty list: a token, and how often it is in the completion. Each token once, ids ascending.
COUNT_TOKEN: Final = 0
COUNT_SEEN: Final = 1  # occurrences, and PROMPT_BIT if the token is in the prompt
COUNT_WORDS: Final = 2
PROMPT_BIT: Final = 1 << 30

# The head of an admission record, word by word as above; the seed is two of them, the rest is 0.
ADMISSION_HEAD: Final = struct.Struct(f"<ififfQ8i3f3i{4 * (ADMIT_WORDS - ADMIT_STATE_SLOT - 1)}x")

PLAN_WORDS: Final = 2048  # 8 KiB: what does not fit waits for the next launch


@dataclass(frozen=True, slots=True)
class Admission:
    """A row's parameters on its way to the device: everything that its slot must hold before its first F."""

    slot: int
    words: NDArray[np.int32]  # the record and its lists

    @property
    def size(self) -> int:
        """Words in the bulk slot."""
        return int(self.words.size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one row.

    target: the prompt's next token, where the chunk's last query token is to leave its log-probability; -1: it is not.
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

    rows: row slots of F, ascending. chunks: those of them with query tokens of their own.
    """

    number: int
    rows: NDArray[np.int32]  # [rows]
    samples: NDArray[np.bool_]  # [rows] the next launch samples this row
    row_list_changed: bool
    appends: NDArray[np.int32]  # [n, 3] (slot, index, block)
    chunks: tuple[Chunk, ...] = ()
    admissions: tuple[Admission, ...] = ()
    tokens: int = 0


def stage(plan: LaunchPlan, body: NDArray[np.int32], bulk: NDArray[np.int32]) -> None:
    """Write a plan into its staging slot: `body` [plan_words] and `bulk` [bulk_words].

    Raises OverflowError where the plan is larger than its slot; the scheduler never makes such a plan.
    """
    rows = plan.rows.size if plan.row_list_changed else 0
    appends, chunks, admissions = len(plan.appends), len(plan.chunks), len(plan.admissions)
    end = HEADER_WORDS + rows + appends * APPEND_WORDS + chunks * CHUNK_WORDS + admissions
    bulk_words = sum(c.words for c in plan.chunks) + sum(a.size for a in plan.admissions) if chunks or admissions else 0
    if end > body.size or bulk_words > bulk.size:
        raise OverflowError(f"plan {plan.number} needs {end} + {bulk_words} words of {body.size} + {bulk.size}")
    _HEADER.pack_into(
        body.data,
        0,
        plan.number,
        plan.rows.size,
        plan.tokens,
        plan.row_list_changed,
        appends,
        chunks,
        admissions,
        bulk_words,
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
    bulk_words: int
    rows: NDArray[np.int32] | None  # [rows], None: unchanged
    appends: NDArray[np.int32]  # [n, 3]
    chunks: NDArray[np.int32]  # [n, CHUNK_WORDS]
    admissions: NDArray[np.int32]  # [n] offsets into the bulk slot
    words: int  # of the plan slot, header included

    @property
    def bytes_read(self) -> int:
        """What a device copies to take this plan in."""
        return 4 * (self.words + self.bulk_words)


def read_plan(body: NDArray[np.int32]) -> PlanView:
    """The plan in a staging slot."""
    low, high, num_rows, tokens, has_rows, appends, chunks, admissions, bulk_words = body[: BULK_WORDS + 1].tolist()
    at = HEADER_WORDS
    rows = body[at : at + num_rows] if has_rows else None
    at += num_rows if has_rows else 0
    append_end = at + appends * APPEND_WORDS
    chunk_end = append_end + chunks * CHUNK_WORDS
    end = chunk_end + admissions
    return PlanView(
        number=(high << 32) | (low & 0xFFFFFFFF),
        num_rows=num_rows,
        tokens=tokens,
        bulk_words=bulk_words,
        rows=rows,
        appends=body[at:append_end].reshape(appends, APPEND_WORDS),
        chunks=body[append_end:chunk_end].reshape(chunks, CHUNK_WORDS),
        admissions=body[chunk_end:end],
        words=end,
    )


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


def read_admission(bulk: NDArray[np.int32], offset: int) -> AdmissionView:
    """The admission record at `offset` of a bulk slot."""
    head = bulk[offset : offset + ADMIT_WORDS]
    at = offset + ADMIT_WORDS
    lists: list[NDArray[np.int32]] = []
    for count in (ADMIT_STOP_IDS, ADMIT_BIAS, ADMIT_BIAS, ADMIT_ALLOWED_WORDS, ADMIT_BLOCKS):
        size = int(head[count])
        lists.append(bulk[at : at + size])
        at += size
    stop_ids, bias_ids, bias_values, allowed, blocks = lists
    entries = int(head[ADMIT_COUNTS])
    counts = bulk[at : at + entries * COUNT_WORDS].reshape(entries, COUNT_WORDS)
    return AdmissionView(head, stop_ids, bias_ids, bias_values.view(np.float32), allowed, blocks, counts)
