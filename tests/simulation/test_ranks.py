"""Lives with several ranks, each late by its own seed: the same tokens and the same memory as with one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runahead.runtime.ranks.ranked_device import RankedDevice
from tests.simulation.compare import check_script
from tests.simulation.generate import make_script
from tests.simulation.life import Broken, Life
from tests.simulation.script import GRAMMARS, SERIAL, Kind, Script

# By number of ranks; with two of every mode.
_SEEDS = {2: (0, 1, 2, 3, 4, 8), 4: (2, 4), 8: (1,), 16: (5,)}
_STRUCTURED = (2, 4, 8, 29)  # some requests have a grammar, and masks come late


def script_of(seed: int) -> Script:
    """Without rests of the device: for these the device over ranks asks a real clock."""
    script = make_script(seed)
    events = tuple(event for event in script.events if event.kind is not Kind.STALL)
    return replace(script, world=replace(script.world, pause_s=0.0), events=events)


@pytest.mark.parametrize(("num_ranks", "seed"), [(num, seed) for num, seeds in _SEEDS.items() for seed in seeds])
def test_ranks_that_fall_behind_answer_as_the_model_says(num_ranks: int, seed: int) -> None:
    """At every depth, in one pool, with everything that is released poisoned on every rank."""
    script = script_of(seed)
    assert len(check_script(script, num_ranks)) == 1 + len(script.world.depths)


def test_ranks_do_fall_behind() -> None:
    script = script_of(0)
    life = Life(script, max(script.world.depths), num_ranks=4)
    life.live()
    behind = [each.most_behind for each in life.chain.ranks.followers]
    assert max(behind) > 1 and len(set(behind)) > 1, behind


def test_masks_are_overwritten_before_ranks_that_fall_behind_come_to_their_launch() -> None:
    """And they change nothing there: the first rank read them, and the others take its rows over."""
    overwritten = dict[int, int]()
    for seed in _STRUCTURED:
        script = script_of(seed)
        assert script.world.mode in GRAMMARS or any(ask.grammar for ask in script.asks)
        life = Life(script, max(script.world.depths), num_ranks=2)
        life.live()
        overwritten[seed] = life.chain.ranks.followers[0].program.overwritten
    assert sum(overwritten.values()) > 10 and sum(count > 0 for count in overwritten.values()) > 1, overwritten


@pytest.mark.parametrize("seeds", [range(4), _STRUCTURED], ids=["all", "structured"])
def test_what_is_released_before_the_last_rank_has_ended_is_seen(
    seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row slots with their masks, blocks, states, and slots of the rings."""
    monkeypatch.setattr(RankedDevice, "_least", lambda device, mark: int(device._views.words[0, mark]))
    broken = 0
    for script in map(script_of, seeds):
        for depth in (SERIAL, *script.world.depths):
            try:
                Life(script, depth, num_ranks=2).live()
            except Broken:
                broken += 1
    assert broken > len(seeds)
