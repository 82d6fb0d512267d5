"""Launches made by hand, one after the other, without engine or scheduler: rows in slots of the test's choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runahead.cuda_graphs.buckets import Buckets, GraphKey
from runahead.cuda_graphs.device import Device, Form, LaunchShape, Program
from runahead.cuda_graphs.rings import TOKEN_MASK, VOID, RingMemory
from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT
from runahead.runtime.plan import Admission, Chunk, LaunchPlan, shape_of, stage
from runahead.runtime.scheduler.new_row import NO_COUNTS, admission_record, penalty_list
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams

ENDLESS = StoppingParams(max_tokens=10_000, ignore_eos=True)
_NO_APPENDS = np.zeros((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """What F left for one query token of a prompt."""

    logprob: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """What S left for one token."""

    token: int
    flags: int
    logprob: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one launch left, by row slot."""

    tokens: dict[int, int]  # of S: the first token of each row that the launch before asked for
    flags: dict[int, int]  # the other bits of the cells of these
    runs: dict[int, list[Cell]]  # all that S brought of these rows
    finite: dict[int, bool]  # of F
    prompt: dict[int, list[PromptEntry]]  # of F


@dataclass(frozen=True, slots=True)
class State:
    """What a row with a recurrent state has beside its blocks. found: of its blocks, those that it begins behind, with
    the snapshot `begins_as`. snapshots: places for those of its borders."""

    slot: int
    snapshots: tuple[int, ...]
    found: int = 0
    begins_as: int = 0


@dataclass(slots=True)
class _Row:
    known: list[int]
    prompt_len: int
    sampling: SamplingParams
    penalty_slot: int
    blocks: tuple[int, ...]
    stopping: StoppingParams
    max_len: int
    computed: int = 0
    admitted: bool = False
    state: State | None = None


@dataclass(slots=True)
class Launches:
    """run: does a launch whose plan is staged, S, apply and F, and returns when F has ended.

    Row slot s owns the blocks from 1 + s * blocks_each on, and the snapshots from 1 + s * borders on.
    """

    run: Callable[[LaunchShape], None]
    rings: RingMemory
    vocab_size: int
    blocks_each: int
    borders: int | None = None  # with a snapshot, of each row; None: the model keeps no states
    number: int = 0
    _rows: dict[int, _Row] = field(default_factory=dict)
    _last: list[tuple[int, bool]] = field(default_factory=list)
    _drafts: int = 0  # of the launch before

    def begin(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        said: Sequence[int] = (),
        penalty_slot: int = NO_SLOT,
        stopping: StoppingParams = ENDLESS,
        max_len: int = 1 << 20,
    ) -> None:
        """A row is admitted with its next chunk. said: its completion before an eviction."""
        first = 1 + slot * self.blocks_each
        blocks = tuple(range(first, first + self.blocks_each))
        row = _Row([*prompt, *said], len(prompt), sampling, penalty_slot, blocks, stopping, max_len)
        self._rows[slot] = row
        row.state = self.state_of(slot)

    def state_of(self, slot: int, found: int = 0, begins_as: int = 0) -> State | None:
        """Of a row in this slot, where the model keeps states."""
        if self.borders is None:
            return None
        first = 1 + slot * self.borders
        return State(slot, tuple(range(first, first + self.borders)), found, begins_as)

    def launch(
        self, work: Mapping[int, int], form: Form = Form.FULL, drafts: int = 0,
        appends: Sequence[tuple[int, int, int]] = (),
    ) -> Outcome:  # fmt: skip
        """work: by row slot, how many of the tokens that are known of it F takes; more than are left takes them all.
        A row whose tokens are all taken decodes, with so many drafts. Empty: a closing launch. appends: what the plan
        writes into block tables beside what begins a row: slot, place, block."""
        self.number += 1
        slots = sorted(work)
        chunks = [self._chunk(slot, work[slot]) for slot in slots]
        samples = [chunk is None or chunk.samples for chunk in chunks]
        new = [slot for slot in slots if not self._rows[slot].admitted]
        admissions = tuple(map(self._admission, new))
        drafts = drafts if None in chunks else 0
        counts = [1 + drafts if chunk is None else chunk.tokens.size for chunk in chunks]
        plan = LaunchPlan(
            self.number,
            np.array(slots, np.int32),
            np.array(samples, np.bool_),
            True,
            np.concatenate([_NO_APPENDS, *map(self._appends, new), np.array(appends, np.int32).reshape(-1, 3)]),
            tuple(chunk for chunk in chunks if chunk is not None),
            admissions,
            tokens=sum(counts),
            sample_rows=len(self._last),
            needs_full=form is Form.FULL,
            is_decode=bool(counts) and set(counts) == {1 + drafts},
            prompt_logprobs=any(c is not None and self._rows[c.slot].sampling.prompt_logprobs >= 0 for c in chunks),
            drafts=drafts,
            guesses=drafts,
            sample_drafts=self._drafts,
        )
        ring = self.rings.slot(self.number)
        stage(plan, self.rings.plan[ring], self.rings.bulk[ring])
        self.run(shape_of(self.rings.plan[ring]))
        runs = {slot: self._run_of(ring, place) for place, (slot, asked) in enumerate(self._last) if asked}
        self._drafts = drafts
        self._last = list(zip(slots, samples, strict=True))
        starts = np.cumsum([0, *counts])
        return Outcome(
            {slot: run[0].token for slot, run in runs.items()},
            {slot: run[0].flags for slot, run in runs.items()},
            runs,
            {slot: bool(self.rings.finite[ring, place]) for place, slot in enumerate(slots)},
            {c.slot: self._entries(c, int(starts[place])) for place, c in enumerate(chunks) if c is not None},
        )

    def decode(self, slots: Sequence[int], count: int, form: Form = Form.FULL) -> dict[int, list[int]]:
        """Tokens of `count` launches in which these rows decode."""
        found: dict[int, list[int]] = {slot: [] for slot in slots}
        for _ in range(count):
            for slot, token in self.launch(dict.fromkeys(slots, 1), form).tokens.items():
                if slot in found:
                    found[slot].append(token)
        return found

    def _run_of(self, ring: int, place: int) -> list[Cell]:
        """The cells of a row: its first one, and those behind it that hold tokens."""
        cells = self.rings.cells[ring, place, : 1 + self._drafts]
        assert (cells >> 32 == self.number).all()
        there = (cells & VOID) == 0
        count = max(1, int(np.count_nonzero(there)))
        assert not there[count:].any()
        return [self._cell(ring, place, offset) for offset in range(count)]

    def _cell(self, ring: int, place: int, offset: int) -> Cell:
        low = int(self.rings.cells[ring, place, offset]) & 0xFFFFFFFF
        return Cell(
            low & TOKEN_MASK,
            low & ~TOKEN_MASK,
            float(self.rings.logprob[ring, place, offset]),
            tuple(self.rings.top_ids[ring, place, offset].tolist()),
            tuple(self.rings.top_logprobs[ring, place, offset].tolist()),
        )

    def sample_next(self, slots: Sequence[int]) -> None:
        """The next launch samples these rows, whoever was in the last F. The device has been told."""
        self._last = [(slot, True) for slot in slots]

    def _chunk(self, slot: int, count: int) -> Chunk | None:
        row = self._rows[slot]
        start, end = row.computed, min(row.computed + count, len(row.known))
        if start == end:
            return None
        row.computed = end
        last = end == len(row.known)
        target = -1 if last or row.sampling.prompt_logprobs < 0 else row.known[end]
        return Chunk(slot, start, np.array(row.known[start:end], np.int32), last, target)

    def _admission(self, slot: int) -> Admission:
        row = self._rows[slot]
        row.admitted = True
        state = row.state
        record = admission_record(
            slot,
            row.sampling,
            row.stopping,
            row.prompt_len,
            row.max_len,
            (),
            blocks=row.blocks if state is None else row.blocks[: state.found],
            penalty_slot=row.penalty_slot,
            counts=self._counts(row) if row.sampling.has_penalty else NO_COUNTS,
            state_slot=NO_SLOT if state is None else state.slot,
            begins_as=NO_SNAPSHOT if state is None else state.begins_as,
        )
        return Admission(slot, record)

    def _appends(self, slot: int) -> NDArray[np.int32]:
        """What the admission of a row with a state leaves to say of its line of the block table. [n, 3]"""
        row = self._rows[slot]
        if row.state is None:
            return _NO_APPENDS
        found, line = row.state.found, (*row.blocks, *row.state.snapshots)
        return np.array([(slot, place, line[place]) for place in range(found, len(line))], np.int32)

    @staticmethod
    def _counts(row: _Row) -> NDArray[np.int32]:
        known = np.array(row.known, np.int32)
        repeats = row.sampling.repetition_penalty != 1
        prompt_ids = np.unique(known[: row.prompt_len]) if repeats else known[:0]
        return penalty_list(prompt_ids, known[row.prompt_len :])

    def _entries(self, chunk: Chunk, first: int) -> list[PromptEntry]:
        asked = self._rows[chunk.slot].sampling.prompt_logprobs
        if asked < 0:
            return []
        ring = self.rings.slot(self.number)
        return [
            PromptEntry(
                float(self.rings.prompt_logprob[ring, j]),
                tuple(self.rings.prompt_top_ids[ring, j, :asked].tolist()),
                tuple(self.rings.prompt_top_logprobs[ring, j, :asked].tolist()),
            )
            for j in range(first, first + chunk.tokens.size - chunk.samples)
        ]


def over_program(program: Program) -> Callable[[LaunchShape], None]:
    """Runs launches on a program in ordinary memory."""

    def run(shape: LaunchShape) -> None:
        program.sample(shape)
        program.apply(shape)
        if not shape.is_closing:
            program.forward(shape)

    return run


def as_captured(
    run: Callable[[LaunchShape], None], buckets: Buckets, taken: Counter[GraphKey]
) -> Callable[[LaunchShape], None]:
    """Runs each launch in the shape that its graph was captured with, where it has one, and counts them in `taken`;
    others as a device enqueues them in pieces."""

    def run_padded(shape: LaunchShape) -> None:
        key = buckets.launch_key(shape)
        if key is None:
            run(buckets.padded(shape))
        else:
            taken[key] += 1
            run(key.shape._replace(number=shape.number))

    return run_padded


def over_device(device: Device) -> Callable[[LaunchShape], None]:
    """Runs launches on a device, and waits for each."""

    def run(shape: LaunchShape) -> None:
        device.launch(shape)
        while device.ended() < shape.number:
            device.wait(1 << 62, shape.number - 1, (), 1.0)

    return run
