"""Rows on the host devices, put in any state, and launches of them by hand."""

from __future__ import annotations

import numpy as np

from runahead.cuda_graphs.rings import RingLayout, allocate_rings
from runahead.runtime.plan import Admission, Chunk, LaunchPlan, stage
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.row_record import token_mask
from runahead.runtime.scheduler.new_row import admission_record
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

BLOCK, VOCAB, MAX_ROWS, PENALTY_SLOTS = 8, 70, 4, 2
NO_APPENDS = np.zeros((0, 3), np.int32)


def make_rows() -> HostRows:
    rings = allocate_rings(RingLayout(4, 256, 256, MAX_ROWS, 1, prompt_tokens=40))
    return HostRows(rings, MAX_ROWS, 4, VOCAB, BLOCK, 4, 4, penalty_slots=PENALTY_SLOTS)


def plan_of(
    number: int,
    slots: list[int],
    *,
    changed: bool = True,
    appends: list[tuple[int, int, int]] | None = None,
    chunks: tuple[Chunk, ...] = (),
    admissions: tuple[Admission, ...] = (),
) -> LaunchPlan:
    table = np.array(appends, np.int32) if appends else NO_APPENDS
    return LaunchPlan(
        number, np.array(slots, np.int32), np.ones(len(slots), np.bool_), changed, table, chunks, admissions
    )


def run(rows: HostRows, plan: LaunchPlan) -> int:
    """S and apply of the launch of this plan. Returns the bytes that apply read."""
    assert rows.begin() == plan.number
    slot = rows.rings.slot(plan.number)
    stage(plan, rows.rings.plan[slot], rows.rings.bulk[slot])
    return rows.apply()


def decoding(rows: HostRows, seq_lens: dict[int, int]) -> None:
    """Rows in decode: slot s has the blocks 10 s + 1, 10 s + 2, ..., and its last token is 20 + s."""
    for slot, length in seq_lens.items():
        rows.alive[slot], rows.seq_len[slot], rows.last_token[slot] = True, length, 20 + slot
        rows.block_table[slot] = 10 * slot + np.arange(1, 5)


def chunk_of(slot: int, start: int, count: int, samples: bool = True) -> Chunk:
    return Chunk(slot, start, np.arange(30, 30 + count, dtype=np.int32), samples)


RICH = SamplingParams(
    temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=(1 << 64) - 5, bias_ids=(4, 9), bias_values=(1.5, -2.0),
    allowed_mask=token_mask((0, 33, 69), 70).tobytes(), logprobs=2,
)  # fmt: skip
PLAIN = SamplingParams(temperature=0.0, seed=8)


def admission(slot: int, sampling: SamplingParams, stop_token_ids: tuple[int, ...]) -> Admission:
    stopping = StoppingParams(max_tokens=10, min_tokens=2, stop_token_ids=stop_token_ids)
    return Admission(slot, admission_record(slot, sampling, stopping, 12, 22, (1,)))


def admit(rows: HostRows, number: int, entry: Admission) -> None:
    slot = entry.slot
    run(rows, plan_of(number, [slot], appends=[(slot, 0, 5)], chunks=(chunk_of(slot, 0, 8),), admissions=(entry,)))


def advance(rows: HostRows, tokens: dict[int, int], finite: tuple[bool, ...] | None = None) -> np.ndarray:
    """S of the next launch, which finds these tokens, by slot. Returns the low halves of the cells."""
    number = rows.begin()
    slots = np.array(list(tokens), np.int64)
    rows.advance(
        np.arange(slots.size),
        slots,
        np.array(list(tokens.values()), np.int32),
        np.array(finite if finite is not None else [True] * slots.size),
    )
    cells = rows.rings.cells[rows.rings.slot(number), : slots.size, 0]
    assert (cells >> 32).tolist() == [number] * slots.size
    return cells & 0xFFFFFFFF


def stopping_rows() -> HostRows:
    rows = make_rows()
    decoding(rows, {0: 6, 1: 9})
    rows.stop_ids[:, 0], rows.stop_count[:] = 50, 1
    rows.max_position[:] = 20
    return rows
