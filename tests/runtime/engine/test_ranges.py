"""Stages of the loop's work have ranges for a profiler where that is asked for, and nowhere else."""

from __future__ import annotations

from collections import Counter

import pytest

from runahead.runtime.engine.ranges import STAGES, name_stages
from runahead.runtime.plan import stage
from tests.runtime.chain import Chain, make_chain


class Profiler:
    """Notes each range: its name, and how many launches were enqueued when it began."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def push(self, name: str) -> None:
        assert not self.open, "no stage lies in another"
        self.open.append(name)
        self.seen[name] += 1

    def pop(self) -> None:
        self.open.pop()


def ran(chain: Chain) -> int:
    """Runs a request, and returns the number of launches."""
    chain.submit(1, [5] * 9, max_tokens=20)
    chain.run()
    return chain.engine.ledger.retired


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_each_stage_of_each_launch_has_its_range(run_ahead: int) -> None:
    profiler = Profiler()
    chain = make_chain(run_ahead)
    name_stages(chain.engine, profiler.push, profiler.pop)
    launches = ran(chain)
    assert set(profiler.seen) == set(STAGES)
    assert {profiler.seen[stage] for stage in ("stage", "launch", "commit")} == {launches}
    assert profiler.seen["plan"] >= launches, "a plan may find nothing to launch"
    assert profiler.seen["publish"] == launches - 1, "the first launch samples nothing"
    assert not profiler.open


def test_a_range_ends_where_its_stage_fails() -> None:
    profiler, chain = Profiler(), make_chain(2)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    chain.engine.scheduler.plan = fail  # type: ignore[method-assign]
    name_stages(chain.engine, profiler.push, profiler.pop)
    with pytest.raises(ZeroDivisionError):
        ran(chain)
    assert (profiler.seen, profiler.open) == ({"plan": 1}, [])


def test_an_engine_of_which_nobody_asked_for_ranges_has_none() -> None:
    named, plain = make_chain(2).engine, make_chain(2).engine
    name_stages(named, lambda name: None, lambda: None)
    for of in ("scheduler", "device", "publisher"):
        assert len(vars(getattr(named, of))) == len(vars(getattr(plain, of))) + 1
    assert (vars(named).keys(), vars(plain)["stage"]) == (vars(plain).keys(), stage)
