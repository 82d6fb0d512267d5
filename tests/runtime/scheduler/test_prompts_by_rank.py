"""Of several prompts that are being prefilled, the best ranked goes first where the budget is for one."""

from __future__ import annotations

from dataclasses import replace

from runahead.runtime.plan import LaunchPlan
from runahead.runtime.scheduler.plan_builder import Planned
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import whole

FOUND = [(7 * i) % 90 + 2 for i in range(60)]


def plans_of(chain: Chain) -> list[LaunchPlan]:
    """Plans that the chain makes from now on."""
    scheduler = chain.engine.scheduler
    plan, plans = scheduler.plan, list[LaunchPlan]()

    def watched() -> Planned | None:
        made = plan()
        if made:
            plans.append(made.plan)
        return made

    scheduler.plan = watched  # type: ignore[method-assign]
    return plans


def test_a_prompt_of_a_higher_priority_overtakes_one_in_a_lower_slot() -> None:
    """Chunks are 16 tokens and a launch carries 24: a whole chunk, and the 8 behind a cached block."""
    chain = make_chain(1, schedule=no_step, max_prefill_tokens=24)
    plans = plans_of(chain)
    chain.submit(1, FOUND[:9], max_tokens=1, ignore_eos=True)
    chain.run()
    plans.clear()
    chain.submit(2, [3] * 100, max_tokens=3, ignore_eos=True)
    chain.turn_until(lambda: plans)
    chain.submit(3, FOUND, max_tokens=3, ignore_eos=True, priority=1)
    chain.run()
    assert chain.admitted()[3].cached_tokens == 8
    carried = [[(chunk.slot, chunk.tokens.size) for chunk in made.chunks] for made in plans]
    assert carried[:6] == [[(0, 16)], [(0, 16), (1, 8)], [(1, 16)], [(1, 16)], [(1, 12)], [(0, 16)]]
    assert {handle: chain.tokens()[handle] for handle in (2, 3)} == {2: whole([3] * 100, 3), 3: whole(FOUND, 3)}


def test_a_short_chunk_does_not_overtake_a_better_ranked_one_that_does_not_fit() -> None:
    """Chunks are 16 tokens. The second launch may carry 24: 16 of the first prompt, not the last 8 of the third."""
    chain = make_chain(1, schedule=no_step, max_prefill_tokens=64)
    plans = plans_of(chain)
    lengths = {1: 64, 2: 64, 3: 24}
    for handle, length in lengths.items():
        chain.submit(handle, [handle + 2] * length, max_tokens=3, ignore_eos=True)
    chain.turn_until(lambda: plans)
    scheduler = chain.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_prefill_tokens=24)
    chain.run()
    carried = [[(chunk.slot, chunk.tokens.size) for chunk in made.chunks] for made in plans if made.chunks]
    first, second, last = ([(slot, 16)] for slot in (0, 1, 2))
    assert carried == [[*first, *second, *last], first, first, first, [*second, (2, 8)], second, second]
    assert chain.tokens() == {handle: whole([handle + 2] * length, 3) for handle, length in lengths.items()}
