"""Every figure of `Stats` that the engine gathers is fed: in a life in which everything happens, none stays at 0."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Final

import msgspec
import pytest

from runahead.cuda_graphs.device import DeviceCounters
from runahead.runtime.engine.figures import Figures, LogMode
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import SamplingParams
from tests.cuda_graphs.simulated_device import seeded_schedule
from tests.project.repository import ROOT, parsed
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import VOCAB

# Of graphs, which CUDA alone has: `tests/gpu/test_cuda_assembly.py` looks at them.
OF_GRAPHS: Final = {"graph_captures", "graph_replays", "fallbacks"}
# The simulated device has no time between the parts of a launch: `test_idle_inside_launches.py` looks at it.
INSIDE_A_LAUNCH: Final = {"device_idle_inside_s"}
# No row here has a grammar, drafts, a recurrent state or several ranks: `test_late_masks.py`,
# `test_structures_served.py`, `tests/parity/test_drafts.py`, `test_recurrent_rows.py` and `test_rank_engines.py` look
# at these.
ELSEWHERE: Final = {"held_rows", "drafted", "accepted", "rank_wait_s"} | {
    name for name in EngineStats.__struct_fields__ if name.startswith(("masks_", "snapshots_"))
}
EVENTS: Final = {"admitted", "chunk", "finished", "aborted", "paused", "resumed", "evicted", "readmitted"}
PHASES: Final = {"WAITING", "PREFILL", "DECODE", "PAUSED"}
REASONS: Final = {"END_OF_SEQUENCE", "STOP", "LENGTH", "CONTEXT_LENGTH", "ABORTED", "CANCELLED"}
BUSY: Final = SamplingParams(seed=1, temperature=1.0, presence_penalty=0.5)


def fed(stats: EngineStats) -> Iterator[str]:
    """Figures that are not 0 now, those inside maps and structs by their paths."""

    def walk(path: str, value: object) -> Iterator[str]:
        if isinstance(value, msgspec.Struct):
            value = {name: getattr(value, name) for name in value.__struct_fields__}
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield from walk(f"{path}.{name}", inner)
        elif any(value) if isinstance(value, list) else value:
            yield path

    for name in stats.__struct_fields__:
        yield from walk(name, getattr(stats, name))


def expected() -> set[str]:
    """All that must be fed at some time."""
    maps = {
        "finished": REASONS,
        "aborted": PHASES | {"PREPARING"},
        "events": {f"{kind}.{figure}" for kind in EVENTS for figure in ("count", "held")} | {"admitted.idle"},
        "launches_by_kind": {"decode", "mixed", "closing"},
        "launches_by_depth": {"1", "2"},
        "barriers": {"logging", "test"},
        "barrier_s": {"logging", "test"},
        "first_token": {"counts", "sum_s"},
        "inter_token": {"counts", "sum_s"},
        "queue": {"counts", "sum_s"},
        "end_to_end": {"counts", "sum_s"},
    }
    plain = {name for name in EngineStats.__struct_fields__ if name not in maps}
    inside = {f"{name}.{key}" for name, keys in maps.items() for key in keys}
    return (plain | inside) - OF_GRAPHS - INSIDE_A_LAUNCH - ELSEWHERE


class Life:
    """One engine that runs out of blocks, rows, penalty slots and prompt tokens. seen: figures that were not 0."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.seen: set[str] = set()
        self.handle = 0
        self.chain: Chain = make_chain(
            2,
            schedule=seeded_schedule(seed) if seed % 2 else no_step,
            max_rows=4,
            num_blocks=1 + self.dice.choice((9, 12)),
            context_length=64,
            run_ahead_tokens=20,
            penalty_slots=1,
            log_interval=7,
            log_mode=LogMode.BARRIER,
        )

    def live(self) -> None:
        for _ in range(60):
            self._ask()
            for _ in range(self.dice.choice((1, 2, 8, 20))):
                self._turn()
            if self.dice.random() < 0.3:
                self._interrupt()
        self._announce()
        self.chain.tell(None, owner=2)
        self.chain.run()
        self.chain.engine.drain("test")
        self._look()

    def _turn(self) -> None:
        self.chain.turn()
        self._look()

    def _look(self) -> None:
        self.seen.update(fed(self.chain.engine.stats()))

    def _ask(self) -> None:
        dice = self.dice
        self.handle += 1
        self.chain.submit(
            self.handle,
            [7] * dice.choice((3, 17, 30, 50)),  # many begin alike
            owner=dice.choice((1, 2)),
            seed=dice.getrandbits(60),
            priority=dice.choice((0, 0, 1)),
            sampling=BUSY if dice.random() < 0.2 else None,
            max_tokens=dice.choice((1, 5, 40, 40)),
            stop_token_ids=tuple(dice.sample(range(2, VOCAB), dice.choice((0, 4)))),
            ignore_eos=dice.random() < 0.7,
        )

    def _announce(self) -> None:
        """Two requests whose prompts never come."""
        for name in ("first", "second"):
            self.handle += 1
            self.chain.tell(m.Announce(self.handle, name), owner=2)
        self._turn()
        self.chain.tell(m.Abort(1, ("first",)))
        self._turn()

    def _interrupt(self) -> None:
        """Of those that are served: one by chance, or one that is paused or waits."""
        served = [tracked.request for tracked in self.chain.engine.registry.all()]
        if not served:
            return
        phase = self.dice.choice(sorted(PHASES))
        chosen = [one for one in served if self.chain.engine.scheduler.holdings.phase_of(one) == phase] or served
        request = self.dice.choice(chosen)
        if self.dice.random() < 0.3:
            self.chain.tell(m.Cancel(request.handle), owner=request.owner)
        else:
            self.chain.tell(m.Abort(1, (request.request_id,)))


def test_no_figure_stays_at_0_where_everything_happens() -> None:
    missing = expected()
    for seed in range(40):
        life = Life(seed)
        life.live()
        missing -= life.seen
        if not missing:
            return
    raise AssertionError(f"never fed: {sorted(missing)}")


def test_a_figure_that_nobody_feeds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "barrier", lambda figures, reason, seconds: None)
    life = Life(2)
    life.live()
    missing = {name for name in expected() - life.seen if name.startswith("barrier")}
    assert missing == {"barriers.logging", "barriers.test", "barrier_s.logging", "barrier_s.test"}


def test_the_cuda_device_counts_whatever_is_counted_of_a_device() -> None:
    counted = {
        node.attr
        for statement in ast.walk(parsed(ROOT / "cuda_graphs" / "cuda_device.py"))
        if isinstance(statement, ast.AugAssign)
        for node in ast.walk(statement.target)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.counters"
    }
    assert counted == {field.name for field in fields(DeviceCounters)}
