"""Lives with several ranks, each late by its own seed: the same tokens and the same memory as with one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice

import pytest

from runahead.runtime.ranks.ranked_device import RankedDevice
from runahead.runtime.ranks.segment import ENDED
from tests.simulation.compare import check_script
from tests.simulation.generate import make_script, mode_of
from tests.simulation.life import Broken, Life
from tests.simulation.script import SERIAL, Kind, Mode, Script

_MODES = (Mode.PLAIN, Mode.DRAFTS, Mode.STATE)  # without masks, which ranks would read at different times
_SEEDS = {2: 6, 4: 3, 8: 2, 16: 1}  # by number of ranks
_FEW = 5


def scripts() -> list[Script]:
    """Scripts of the first seeds, without rests of the device: for these the device over ranks asks a real clock."""
    made = (make_script(seed) for seed in count() if mode_of(seed) in _MODES)
    fit = (script for script in made if not any(ask.grammar for ask in script.asks))
    return [_without_rests(script) for script in islice(fit, max(_SEEDS.values()))]


def _without_rests(script: Script) -> Script:
    events = tuple(event for event in script.events if event.kind is not Kind.STALL)
    return replace(script, world=replace(script.world, pause_s=0.0), events=events)


@pytest.mark.parametrize(
    ("num_ranks", "place"), [(num_ranks, place) for num_ranks, most in _SEEDS.items() for place in range(most)]
)
def test_ranks_that_fall_behind_answer_as_the_model_says(num_ranks: int, place: int) -> None:
    """At every depth, in one pool, with everything that is released poisoned on every rank."""
    script = scripts()[place]
    assert len(check_script(script, num_ranks)) == 1 + len(script.world.depths)


def test_ranks_do_fall_behind() -> None:
    life = Life(scripts()[0], max(scripts()[0].world.depths), num_ranks=4)
    life.live()
    behind = [each.most_behind for each in life.chain.ranks.followers]
    assert max(behind) > 1 and len(set(behind)) > 1, behind


def test_what_is_released_before_the_last_rank_has_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankedDevice, "_least", lambda device: int(device._views.words[0, ENDED]))
    broken = 0
    for script in scripts()[:_FEW]:
        for depth in (SERIAL, *script.world.depths):
            try:
                Life(script, depth, num_ranks=2).live()
            except Broken:
                broken += 1
    assert broken > _FEW
