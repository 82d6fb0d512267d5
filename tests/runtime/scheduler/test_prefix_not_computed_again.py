"""What the prefix cache has found is in no launch: not computed, not written again."""

from __future__ import annotations

import pytest

from runahead.runtime.scheduler.ledger import Launch
from tests.runtime.chain import make_chain, no_step
from tests.runtime.pressure import whole

PROMPT = [(7 * i) % 90 + 2 for i in range(40)]  # five blocks of 8, in chunks of 16


@pytest.mark.parametrize(("length", "found"), [(9, 8), (17, 16), (20, 16), (39, 32), (40, 32)])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_a_prompt_that_is_found_has_only_the_rest_of_its_tokens_in_launches(
    depth: int, length: int, found: int
) -> None:
    chain = make_chain(depth, schedule=no_step)
    enqueue, carried = chain.ledger.enqueue, [0]

    def counted(launch: Launch) -> None:
        carried[-1] += launch.prompt_tokens
        enqueue(launch)

    chain.ledger.enqueue = counted  # type: ignore[method-assign]
    for handle in (1, 2):
        carried.append(0)
        chain.submit(handle, PROMPT[:length], max_tokens=5, ignore_eos=True)
        chain.run()
    assert carried[1:] == [length, length - found]
    assert chain.tokens() == {handle: whole(PROMPT[:length], 5) for handle in (1, 2)}
