"""The simulator's lives on the row kernels: every plan that its engine stages and every token that it samples, with all
the evictions, pauses, aborts and slots used again, leave the row state of the reference after each S and each apply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import HELD, NON_FINITE, NOTHING_LEFT, STOPPED, VOID  # noqa: E402
from runahead.runtime.plan import HEADER_WORDS, read_plan  # noqa: E402
from runahead.runtime.row_record import read_admission  # noqa: E402
from tests.runtime.kernels.device_twin import DeviceTwin  # noqa: E402
from tests.simulation.generate import make_script, mode_of  # noqa: E402
from tests.simulation.life import Life  # noqa: E402
from tests.simulation.programs import SimulatedRows  # noqa: E402
from tests.simulation.script import SERIAL, Mode  # noqa: E402

# The lives whose rows have no drafts but those that their grammars force: the made-up drafts of others are in no row
# state. Of the lives with states, half count what a state stands for, as with drafts.
SEEDS: Final = [seed for seed in range(100) if mode_of(seed) in (Mode.PLAIN, Mode.STATE, Mode.MASKS)]
# A launch takes 8 ms in the interpreter: a few lives in every run, each at one of its depths; all by `make kernels`.
IN_EVERY_RUN: Final = 5
WITH_STATES: Final = 3, 1
HELD_AND_MOVED: Final = 59, SERIAL  # a life in which rows that are held change their places
WANTED: Final = (
    "stopped",
    "void",
    "not finite",
    "steady launch",
    "closing launch",
    "chunk that is sampled",
    "chunk that is not",
    "prompt log-probabilities",
    "admission",
    "admission with a cached prefix",
    "admission with penalties",
    "append",
    "rows compared with the host's truth",
    "held",
    "held and in another place afterwards",
    "nothing left",
    "launch with drafts",
    "draft that was kept",
    "held with drafts",
    "held with drafts and sampled afterwards",
)

_FLAGS: Final = (
    ("stopped", STOPPED),
    ("void", VOID),
    ("not finite", NON_FINITE),
    ("held", HELD),
    ("nothing left", NOTHING_LEFT),
)

pytestmark = [
    pytest.mark.timeout(900),
    # The interpreter's own way with a loop whose length is read on the device.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


class Run:
    """What an S that looks at drafts has sampled, token after token: [rows, 1 + K] each."""

    def __init__(self, rows: int, width: int) -> None:
        self.tokens = np.full((rows, width), 7, np.int32)  # where nothing was sampled, anything
        self.finite = np.ones((rows, width), np.bool_)
        self.nothing_left = np.zeros((rows, width), np.bool_)

    def note(
        self, indexes: NDArray[np.intp], offset: int, tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        nothing_left: NDArray[np.bool_] | None,
    ) -> None:  # fmt: skip
        self.tokens[indexes, offset], self.finite[indexes, offset] = tokens, finite
        if nothing_left is not None:
            self.nothing_left[indexes, offset] = nothing_left


class Follower:
    """The kernels do, after each step of a life's device, what its row state has just done. `seen` counts what."""

    def __init__(self, life: Life) -> None:
        self._program = program = life.chain.program
        self._rows = program.rows
        assert isinstance(self._rows, SimulatedRows)
        world = life.script.world
        self._twin = DeviceTwin(
            self._rows,
            DEVICE,
            max_tokens=self._rows.rings.layout.prompt_tokens,
            context_length=world.context_length,
            keeps_states=world.mode is Mode.STATE,
            replays=world.mode is Mode.STATE and life.script.seed % 2 == 0,
        )
        self.seen: Counter[str] = self._twin.seen
        self._advance, self._apply, self._read = self._rows.advance, self._rows.apply, program.read_rows
        self._poison_row_slot, self._poison_penalty_slot = program.poison_row_slot, program.poison_penalty_slot
        self._judged, self._begin_runs, self._draft = self._rows.judged, self._rows.begin_verified, self._rows.draft
        self._sample = program.sample
        self._places: dict[int, int] = {}  # of rows that were held when they were judged last
        self._waiting: set[int] = set()  # those of them that have drafts
        self._was_judged = False
        self._run: Run | None = None  # of this S, where it looks at drafts
        self._read_bytes = 0  # of the plan that was applied last
        program.sample = self.sample  # type: ignore[method-assign]
        self._rows.begin_verified, self._rows.draft = self.begin_verified, self.draft  # type: ignore[method-assign]
        self._rows.judged = self.judged  # type: ignore[method-assign]
        self._rows.advance, self._rows.apply = self.advance, self.apply  # type: ignore[method-assign]
        program.poison_row_slot, program.poison_penalty_slot = self.poison_row_slot, self.poison_penalty_slot  # type: ignore[method-assign]
        program.read_rows = self.read_rows  # type: ignore[method-assign]

    def advance(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._advance(indexes, slots, tokens, finite, offset, nothing_left)
        if self._run is not None:
            self._run.note(indexes, offset, tokens, finite, nothing_left)
            return
        judged, self._was_judged = self._was_judged, False
        empty = np.zeros(indexes.size, np.bool_) if nothing_left is None and judged else nothing_left
        self._count(self._twin.advance(indexes, tokens, finite, padding=self._rows.number % 3, nothing_left=empty))

    def _count(self, cells: NDArray[np.int64]) -> None:
        for name, flag in _FLAGS:
            self.seen[name] += int(np.count_nonzero(cells & flag))

    def sample(self, shape: LaunchShape) -> None:
        """Runs are compared when all of S has been done, token after token."""
        self._sample(shape)
        run, self._run = self._run, None
        if run is not None:
            empty, self._was_judged = run.nothing_left if self._was_judged else None, False
            cells = self._twin.advance_verified(run.tokens, run.finite, empty, padding=self._rows.number % 3)
            self._count(cells[:, 0])
            self._count(cells[:, 1:][(cells[:, 1:] & VOID) == 0])
            self.seen["draft that was kept"] += int(np.count_nonzero((cells[:, 1:] & VOID) == 0))

    def begin_verified(self, indexes: NDArray[np.intp], slots: NDArray[np.int64], count: int) -> None:
        self._begin_runs(indexes, slots, count)
        self._run = Run(self._rows.rows.size, 1 + count)

    def judged(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], drafts: int
    ) -> tuple[NDArray[np.intp], NDArray[np.int64], dict[int, list[NDArray[np.int32]]]]:
        before = self._rows.drafted.copy()
        found = self._judged(indexes, slots, drafts)
        self._twin.judge(drafts, padding=self._rows.number % 3)
        self._was_judged = True
        held = {slot for slot in slots.tolist() if self._rows.held[slot]}
        self.seen["held with drafts"] += sum(before[slot] > 0 for slot in held)
        self.seen["held with drafts and sampled afterwards"] += sum(
            slot not in held and self._rows.drafted[slot] > 0 for slot in self._waiting & set(slots.tolist())
        )
        self._waiting = {slot for slot in (self._waiting - set(slots.tolist())) | held if self._rows.drafted[slot]}
        now = dict(zip(slots.tolist(), indexes.tolist(), strict=True))
        self.seen["held and in another place afterwards"] += sum(
            now.get(slot, place) != place for slot, place in self._places.items()
        )
        self._places = {slot: place for slot, place in now.items() if self._rows.held[slot]}
        return found

    def apply(self) -> int:
        read = self._read_bytes = self._apply()
        if not self._rows.most_drafts:
            self._take_plan()
        ring = self._rows.rings.slot(self._rows.number)
        plan, bulk = read_plan(self._rows.rings.plan[ring]), self._rows.rings.bulk[ring]
        self.seen["steady launch"] += plan.num_rows > 0 and plan.words == HEADER_WORDS
        self.seen["closing launch"] += plan.num_rows == 0
        self.seen["append"] += len(plan.appends)
        for *_, samples in plan.chunks.tolist():
            self.seen["chunk that is sampled" if samples else "chunk that is not"] += 1
        for offset in plan.admissions.tolist():
            record = read_admission(bulk, offset)
            self.seen["admission"] += 1
            self.seen["admission with a cached prefix"] += record.blocks.size > 0
            self.seen["admission with penalties"] += record.counts.size > 0
        return read

    def draft(self) -> None:
        """A plan with drafts is taken by the kernels when the reference drafts: what is forced is read then."""
        self._draft()
        if self._rows.most_drafts:
            self._take_plan()
            self.seen["launch with drafts"] += 1

    def _take_plan(self) -> None:
        self.seen["prompt log-probabilities"] += self._twin.apply(
            self._read_bytes, padding=self._rows.number % 2, unowned=self._rows.number % 3
        )

    def poison_row_slot(self, slot: int) -> None:
        self._poison_row_slot(slot)
        self._twin.forget(slot=slot)

    def poison_penalty_slot(self, slot: int) -> None:
        self._poison_penalty_slot(slot)
        self._twin.forget(penalty_slot=slot)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        """What a drain compares with the host's truth: the kernels' rows."""
        self.seen["rows compared with the host's truth"] += int(np.count_nonzero(self._rows.alive))
        return {**self._read(), **self._twin.device.read()}


@cache
def followed(seed: int, depth: int) -> Counter[str]:
    """What happened in the life of this seed at this depth. Raises Broken where a kernel did anything else."""
    life = Life(make_script(seed).in_forms(), depth)
    follower = Follower(life)
    life.live()
    return follower.seen


def depths_of(seed: int) -> tuple[int, ...]:
    return (SERIAL, *make_script(seed).world.depths)


def lives_of_every_run() -> list[tuple[int, int]]:
    """Each of a script's depths has its turn."""
    without_states = [seed for seed in SEEDS if mode_of(seed) is not Mode.STATE][:IN_EVERY_RUN]
    turns = [(seed, depths_of(seed)[i % len(depths_of(seed))]) for i, seed in enumerate(without_states)]
    return [*turns, HELD_AND_MOVED, WITH_STATES]


@pytest.mark.parametrize(("seed", "depth"), lives_of_every_run())
def test_a_life_of_the_simulator_leaves_the_rows_of_the_reference(seed: int, depth: int) -> None:
    assert followed(seed, depth)["admission"]


def test_the_lives_of_every_run_hold_every_kind_of_step() -> None:
    seen = sum((followed(seed, depth) for seed, depth in lives_of_every_run()), Counter[str]())
    assert not [what for what in WANTED if not seen[what]], seen


@pytest.mark.large
@pytest.mark.parametrize("seed", SEEDS)
def test_sixty_lives_at_every_depth_leave_the_rows_of_the_reference(seed: int) -> None:
    for depth in depths_of(seed):
        assert followed(seed, depth)["admission"]
