"""Whatever a script does to an engine: what a launch takes over from the one before would have been made anew."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest

from runahead.runtime.wire import messages as m
from tests.runtime.chain import MemoryLinks
from tests.runtime.scheduler.taken_over import TakenOver, nothing_is_taken_over
from tests.runtime.scheduler.test_steady_decode import Recorder, check_same_truth
from tests.simulation.assembly import SimulatedChain
from tests.simulation.generate import make_script, mode_of
from tests.simulation.life import Life
from tests.simulation.script import Mode

SEEDS = [seed for seed in range(54) if mode_of(seed) in (Mode.PLAIN, Mode.STATE, Mode.MASKS)]  # others draft
FEW = [seed for seed in SEEDS if seed < 30]


class Lived(NamedTuple):
    """A life that is over. sent: all that front ends were sent, and to whom. continued: see `TakenOver`."""

    life: Life
    chain: SimulatedChain
    recorder: Recorder
    sent: list[tuple[int, m.ToFrontEnd]]
    continued: Counter[str]
    has_failed: bool


def keep_what_is_sent(links: MemoryLinks) -> list[tuple[int, m.ToFrontEnd]]:
    """The life itself takes messages away once it has read them."""
    kept: list[tuple[int, m.ToFrontEnd]] = []
    send = links.send

    def watched(owner: int, message: m.ToFrontEnd) -> None:
        kept.append((owner, message))
        send(owner, message)

    links.send = watched  # type: ignore[method-assign]
    return kept


@cache
def lived(seed: int, anew: bool) -> Lived:
    """The script of a seed at one of its depths, so that all depths come up."""
    script = make_script(seed)
    life = Life(script, script.world.depths[seed % len(script.world.depths)])
    chain = life.chain
    recorder, sent = Recorder(chain), keep_what_is_sent(chain.links)
    taken_over = TakenOver(chain.engine.scheduler)
    if anew:
        nothing_is_taken_over(chain.engine.scheduler)
    told = life.live()
    return Lived(life, chain, recorder, sent, taken_over.seen, told.has_failed)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.large) for seed in SEEDS[len(FEW) :])])
def test_a_script_with_every_plan_made_anew_comes_to_the_same(seed: int) -> None:
    quick, anew = lived(seed, anew=False), lived(seed, anew=True)
    assert not anew.continued
    quick.recorder.check_same(anew.recorder)
    assert quick.sent == anew.sent
    assert quick.has_failed == anew.has_failed
    if not quick.has_failed:  # a plan that the device did not take is in no launch, and in the columns or not
        check_same_truth(quick.chain.engine.scheduler, anew.chain.engine.scheduler)


def test_these_scripts_had_plans_that_continue_and_whatever_ends_a_course() -> None:
    seen, depths = Counter[str](), set[int]()
    for one in (lived(seed, anew=False) for seed in FEW):
        stats = one.chain.engine.stats()
        seen.update(one.continued)
        seen.update({kind: event.count for kind, event in stats.events.items()})
        asks = [one.life.script.asks[handle] for handle in one.life._sent]
        seen.update(
            {
                "cached tokens": stats.cached_tokens,
                "requests of another priority": sum(ask.priority != asks[0].priority for ask in asks),
                "requests with penalties": sum(ask.sampling.has_penalty for ask in asks),
                "log-probabilities": sum(len(said.logprobs) for _, said in one.sent if isinstance(said, m.Output)),
                "parts of prompts": sum(isinstance(said, m.PromptLogprobs) for _, said in one.sent),
                "bulk words": sum(len(words) for words in one.recorder.bulks),
                "devices that failed": one.has_failed,
            }
        )
        depths.add(one.life.depth)
    assert depths == {1, 2, 3, 4}
    assert seen["plans"] > 500
    assert seen["borders"] > 100
    assert min(seen["paused"], seen["resumed"], seen["evicted"], seen["readmitted"], seen["aborted"]) > 10
    assert min(seen["cached tokens"], seen["requests of another priority"], seen["requests with penalties"]) > 20
    assert min(seen["log-probabilities"], seen["parts of prompts"]) > 50
    assert seen["bulk words"] > 1000
    assert seen["devices that failed"] > 0
