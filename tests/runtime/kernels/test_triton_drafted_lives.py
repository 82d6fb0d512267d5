"""The simulator's lives of rows with states and drafts on the row kernels: what S keeps of runs, the lines of F and the
states that rows go on with are the reference's, after evictions, pauses, and launches with prompts or other drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.runtime.kernels.triton_device import triton_device

DEVICE = triton_device()

from runahead.cuda_graphs.device import LaunchShape  # noqa: E402
from runahead.cuda_graphs.rings import STATUS_BYTES  # noqa: E402
from runahead.runtime.kernels.triton.row_state.drafts import DraftState, make_draft_state  # noqa: E402
from runahead.runtime.plan import read_plan  # noqa: E402
from runahead.runtime.programs.cpu.inputs import Queries, state_slots_of  # noqa: E402
from tests.runtime.kernels.device_twin import DeviceTwin  # noqa: E402
from tests.simulation.generate import make_script, mode_of  # noqa: E402
from tests.simulation.life import Life  # noqa: E402
from tests.simulation.programs import SimulatedRows  # noqa: E402
from tests.simulation.script import DRAFTS, SERIAL, Mode, Script  # noqa: E402

SEEDS: Final = [seed for seed in range(100) if mode_of(seed) is Mode.STATE_DRAFTS]
IN_EVERY_RUN: Final = ((2, 2), (7, SERIAL))
WANTED: Final = (
    "run", "replayed", "replayed beside a prompt", "void run", "state left in a snapshot", "state from a snapshot",
)  # fmt: skip

pytestmark = pytest.mark.timeout(900)


class DraftTwin(DeviceTwin):
    """Drafts are what the reference's drafter has proposed: the kernel that proposes is tried elsewhere."""

    def _drafts(self, context_length: int, device: torch.device) -> DraftState | None:
        slots, blocks = self.host.alive.size, self.host.max_blocks
        return make_draft_state(slots, context_length, blocks, self._max_rows, DRAFTS, device)

    def apply_drafted(self, read: int) -> None:
        """As `apply`, of a plan with drafts; the lines of F are not known yet."""
        host = self.host
        assert self.device.row_states.lengths.tolist() == host.state_len.tolist(), "what the states stand for"
        ring = host.rings.slot(host.number)
        self.rings.plan[ring], self.rings.bulk[ring] = host.rings.plan[ring], host.rings.bulk[ring]
        self.device.apply(0, 0, True)
        self._synchronize()
        assert self.rings.status[ring, STATUS_BYTES] == read
        self._compare_state()

    def draft(self, queries: Queries) -> None:
        """queries: the reference's, once its drafter has proposed."""
        host, drafts, count = self.host, self.device.drafts, self.host.most_drafts
        assert drafts is not None
        drafts.proposed.copy_(torch.from_numpy(host.proposed))
        drafts.drafted.copy_(torch.from_numpy(host.drafted))
        rows, device = queries.slots.size, self.device
        device.prepare_verified(rows, 1 + count)
        self._synchronize()
        batch, live, lines = device.verify_batch(rows, count), queries.seq_lens > 0, queries.token_ids.size
        alive = np.repeat(live, np.diff(queries.query_start_loc))
        assert batch.query_start_loc.tolist() == queries.query_start_loc.tolist()
        assert batch.seq_lens.tolist() == queries.seq_lens.tolist()
        for name in ("token_ids", "positions", "slot_mapping"):
            found = getattr(batch, name).cpu().numpy()[:lines]
            assert found[alive].tolist() == getattr(queries, name)[alive].tolist(), name
        self._compare_places_of(batch, state_slots_of(host, queries), live)


class Follower:
    """The kernels do, after each step of a life's device, what its row state has just done. `seen` counts what."""

    def __init__(self, life: Life) -> None:
        self._program = program = life.chain.program
        rows = program.rows
        assert isinstance(rows, SimulatedRows)
        self._rows, world = rows, life.script.world
        rows.masks = None  # no row has a grammar
        self._twin = DraftTwin(
            rows,
            DEVICE,
            max_tokens=rows.rings.layout.prompt_tokens,
            context_length=world.context_length,
            keeps_states=True,
            replays=True,
        )
        self.seen: Counter[str] = self._twin.seen
        self._sample, self._advance, self._apply, self._queries = (
            program.sample, rows.advance, rows.apply, rows.queries,
        )  # fmt: skip
        self._run: tuple[NDArray[np.int32], NDArray[np.bool_]] | None = None  # of an S that verifies runs
        program.sample, rows.advance = self.sample, self.advance  # type: ignore[method-assign]
        rows.apply, rows.queries = self.apply, self.queries  # type: ignore[method-assign]
        poison_row_slot, poison_penalty_slot = program.poison_row_slot, program.poison_penalty_slot

        def poison_row(slot: int) -> None:
            poison_row_slot(slot)
            self._twin.forget(slot=slot)

        def poison_penalty(slot: int) -> None:
            poison_penalty_slot(slot)
            self._twin.forget(penalty_slot=slot)

        program.poison_row_slot, program.poison_penalty_slot = poison_row, poison_penalty  # type: ignore[method-assign]

    def sample(self, shape: LaunchShape) -> None:
        size = self._rows.rows.size, 1 + shape.sample_drafts
        self._run = (np.full(size, 7, np.int32), np.ones(size, np.bool_)) if shape.sample_drafts else None
        self._sample(shape)
        if self._run is not None and shape.sample_rows:
            self.seen["run"] += 1
            self.seen["void run"] += int(np.count_nonzero(~self._rows.alive[self._rows.rows[self._rows.samples]]))
            self._twin.advance_verified(*self._run, None)

    def advance(
        self, indexes: NDArray[np.intp], slots: NDArray[np.int64], tokens: NDArray[np.int32], finite: NDArray[np.bool_],
        offset: int = 0, nothing_left: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._advance(indexes, slots, tokens, finite, offset, nothing_left)
        if self._run is None:
            self._twin.advance(indexes, tokens, finite, padding=self._rows.number % 3)
        else:
            self._run[0][indexes, offset], self._run[1][indexes, offset] = tokens, finite

    def apply(self) -> int:
        read = self._apply()
        if self._rows.most_drafts:
            self._twin.apply_drafted(read)
        else:
            self._twin.apply(read, padding=self._rows.number % 2, unowned=self._rows.number % 3)
        return read

    def queries(self) -> Queries:
        queries, rows = self._queries(), self._rows
        if rows.most_drafts:
            self._twin.draft(queries)
        again = np.count_nonzero(state_slots_of(rows, queries).replayed[queries.seq_lens > 0])
        chunks = read_plan(rows.rings.plan[rows.rings.slot(rows.number)]).chunks
        self.seen["replayed beside a prompt" if len(chunks) else "replayed"] += int(again)
        return queries


def script_of(seed: int) -> Script:
    """Without grammars: what they force is no draft of a drafter."""
    script = make_script(seed)
    return replace(script, asks=tuple(replace(ask, grammar="") for ask in script.asks))


@cache
def followed(seed: int, depth: int) -> Counter[str]:
    """What happened in the life of this seed at this depth. Raises Broken where a kernel did anything else."""
    script = script_of(seed)
    life = Life(script.in_forms(), depth)
    follower = Follower(life)
    life.live()
    return follower.seen


@pytest.mark.parametrize(("seed", "depth"), IN_EVERY_RUN)
def test_a_life_of_rows_with_drafts_leaves_the_rows_of_the_reference(seed: int, depth: int) -> None:
    assert followed(seed, depth)["run"]


def test_the_lives_of_every_run_hold_every_kind_of_step() -> None:
    seen = sum((followed(seed, depth) for seed, depth in IN_EVERY_RUN), Counter[str]())
    assert not [what for what in WANTED if not seen[what]], seen


@pytest.mark.large
@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_lives_at_every_depth_leave_the_rows_of_the_reference(seed: int) -> None:
    for depth in (SERIAL, *make_script(seed).world.depths):
        followed(seed, depth)
