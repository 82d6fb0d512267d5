"""Rows with a recurrent state through a life of the engine, on the CPU's device with delays and poison: whoever ends,
is paused or evicted beside a row, the row's tokens are those that it gets alone."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from runahead.cuda_graphs.host_device import HostDevice
from runahead.runtime.engine.loop import Engine
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.figures import EngineStats
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks

PROMPTS = [[(31 * i + 7 * j + i * j) % 150 for j in range(length)] for i, length in enumerate((21, 40, 9, 33, 26, 17))]
TOKENS = 40
GREEDY = SamplingParams(temperature=0.0)


class Life:
    """An engine whose pool is too small for its rows. cancelled: the request that was ended from outside."""

    def __init__(self, folder: Path, depth: int, **sizes: int) -> None:
        settings = {"max_rows": 5, "block_size": 8, "prefill_chunk": 16, "max_prefill_tokens": 32, "num_blocks": 26}
        parts = assembled(
            EngineConfig(
                model=str(folder), run_ahead=depth, context_length=128, device="cpu", threads=1, jitter_seed=depth,
                **{**settings, **sizes},  # type: ignore[arg-type]
            )
        )  # fmt: skip
        assert isinstance(parts.device, HostDevice)
        self.device = parts.device
        self.links = MemoryLinks()
        self.engine = Engine(parts.device, parts.scheduler, self.links, max_queue=100, poison=parts.poison)
        self.cancelled = -1

    def ask(
        self, handle: int, prompt: list[int], tokens: int = TOKENS, sampling: SamplingParams = GREEDY, salt: str = ""
    ) -> None:
        ids = np.asarray(prompt, np.int32).tobytes()
        stopping = StoppingParams(tokens, ignore_eos=True)
        self.links.tell(1, m.Submit(handle, f"r{handle}", ids, sampling, stopping, cache_salt=salt))

    def run(self, phase: str = "") -> dict[int, list[int]]:
        """To its end: tokens by handle. phase: whoever is first seen in it is cancelled."""
        self.engine.turn()
        while len(self.engine.registry):
            for tracked in self.engine.registry.all():
                if self.cancelled < 0 and self.engine.scheduler.holdings.phase_of(tracked.request) == phase:
                    self.cancelled = tracked.request.handle
                    self.links.tell(1, m.Cancel(self.cancelled))
            self.engine.turn()
        self.engine.drain("test")
        slots = self.engine.scheduler.holdings.state_slots
        slots.check()
        assert slots.free == slots.total, "a state slot was not given back"
        return self.said()

    def said(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for _, output in self.links.sent:
            if isinstance(output, m.Output):
                handles, ids = np.frombuffer(output.handles, np.int64), np.frombuffer(output.tokens, np.int32)
                for handle, token in zip(handles.tolist(), ids.tolist(), strict=True):
                    found[handle].append(token)
        return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """What each request gets of an engine that is serial and has one row."""
    life = Life(folder, 0, max_rows=1, num_blocks=40)
    for handle, prompt in enumerate(PROMPTS):
        life.ask(handle, prompt)
    found = life.run()
    life.device.close()
    return found


@pytest.mark.parametrize("phase", ["", "WAITING", "PREFILL", "DECODE", "PAUSED", "LEAVING"])
def test_whoever_is_cancelled_in_whatever_phase_leaves_the_others_their_states(
    folder: Path, alone: dict[int, list[int]], phase: str
) -> None:
    life = Life(folder, 3)
    for handle, prompt in enumerate(PROMPTS):
        life.ask(handle, prompt)
    found = life.run(phase)
    stats = life.engine.stats()
    life.device.close()
    assert (life.cancelled >= 0) == bool(phase), "nobody was seen in this phase"
    assert stats.events["evicted"].count > 0 and stats.events["paused"].count > 0
    for handle, expected in alone.items():
        if handle == life.cancelled:
            assert found[handle] == expected[: len(found[handle])]
        else:
            assert found[handle] == expected, f"request {handle}"


@pytest.mark.parametrize("depth", [0, 4])
def test_prompts_that_come_again_begin_with_a_snapshot_and_say_the_same(
    folder: Path, alone: dict[int, list[int]], depth: int
) -> None:
    life = Life(folder, depth, num_blocks=120, state_snapshots=64, state_snapshot_blocks=2)
    for again in range(2):
        for handle, prompt in enumerate(PROMPTS):
            life.ask(10 * again + handle, prompt)
        # Behind a chunk's end, inside a block, and behind what was generated.
        life.ask(10 * again + 6, PROMPTS[1] + alone[1][:9])
        life.ask(10 * again + 7, PROMPTS[1][:37])
        found = life.run()
    stats = life.engine.stats()
    life.device.close()
    assert stats.snapshots_kept > 0 and stats.snapshots_found >= 8 and stats.cached_tokens >= 8 * 16
    assert stats.snapshots_free + stats.snapshots_cached == stats.snapshots_total and not stats.snapshots_skipped
    for handle, expected in alone.items():
        assert found[handle] == found[10 + handle] == expected, f"request {handle}"
    assert found[6][: TOKENS - 9] == found[16][: TOKENS - 9] == alone[1][9:], "it goes on where the answer was cut"
    assert found[7] == found[17]


def fed_of(life: Life, figures: set[str]) -> set[str]:
    """Those that are not 0 now."""
    stats = life.engine.stats()
    return {name for name in figures if getattr(stats, name)}


@pytest.mark.parametrize("depth", [0, 4])
def test_with_one_snapshot_for_all_rows_borders_go_without_and_everybody_says_the_same(
    folder: Path, alone: dict[int, list[int]], depth: int
) -> None:
    life = Life(folder, depth, num_blocks=120, state_snapshots=1, state_snapshot_blocks=2)
    figures = {name for name in EngineStats.__struct_fields__ if name.startswith("snapshots_")}
    fed = fed_of(life, figures)
    life.ask(10, PROMPTS[1])
    life.run()
    life.ask(11, PROMPTS[1] + alone[1], 1)
    for handle, prompt in enumerate(PROMPTS):
        life.ask(handle, prompt)
    life.engine.turn()
    while len(life.engine.registry):
        fed |= fed_of(life, figures)
        life.engine.turn()
    found = life.run()
    life.device.close()
    assert fed == figures, "a figure of snapshots stays at 0"
    assert {handle: found[handle] for handle in alone} == alone


def test_a_steady_decode_copies_at_most_64_bytes_a_launch(folder: Path) -> None:
    life = Life(folder, 2, block_size=64, prefill_chunk=64, max_prefill_tokens=64)
    for handle in range(4):
        life.ask(handle, PROMPTS[handle][:5], tokens=50)
    while life.engine.stats().generated_tokens < 4 * 8:
        life.engine.turn()
    life.engine.drain("test")
    launches, copied = life.engine.ledger.ended, life.device.counters.bytes_to_device
    while life.engine.ledger.ended < launches + 20:
        life.engine.turn()
    life.engine.drain("test")
    assert life.device.counters.bytes_to_device - copied <= 64 * (life.engine.ledger.ended - launches)
    life.run()
    life.device.close()
