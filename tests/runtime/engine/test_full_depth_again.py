"""The chain is as deep as it may be again, whatever has kept it shallow for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step

DEPTH = 4
LAUNCHES = 12


def hold_back(chain: Chain) -> None:
    """Long prompts, of which no more than one chunk may be uncommitted."""
    for handle in range(2, 6):
        chain.submit(handle, [handle] * 100, max_tokens=4, ignore_eos=True)
    chain.turn_until(lambda: len(chain.finished()) == 4)
    assert chain.engine.stats().held_back > 0, "no launch was held back: this test shows nothing"


def drain(chain: Chain) -> None:
    chain.engine.drain("test")
    assert not chain.ledger.in_flight


def abort(chain: Chain) -> None:
    chain.submit(2, [5, 6], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: 2 in chain.tokens())
    chain.tell(m.Abort(1, ("r2",)))
    chain.turn_until(lambda: chain.finished())


def ask_for_more(chain: Chain) -> None:
    """A neighbour whose launches have the full form."""
    chain.submit(2, [5, 6], max_tokens=4, ignore_eos=True, sampling=SamplingParams(temperature=1.0, top_k=3))
    chain.turn_until(lambda: chain.finished())


@pytest.mark.parametrize("what", [hold_back, drain, abort, ask_for_more], ids=lambda what: what.__name__)
def test_the_full_depth_comes_back(what: Callable[[Chain], None]) -> None:
    chain = make_chain(DEPTH, schedule=no_step, max_prefill_tokens=16, run_ahead_tokens=16)
    chain.submit(1, [3] * 4, max_tokens=120, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    what(chain)
    chain.turn()
    before, launched = chain.engine.figures.launches_by_depth.copy(), chain.ledger.launched
    chain.turn_until(lambda: chain.ledger.launched >= launched + DEPTH + LAUNCHES)
    depths: Counter[int] = chain.engine.figures.launches_by_depth - before
    assert depths[DEPTH] >= LAUNCHES
    assert 1 not in chain.finished(), "the row that decodes has ended: this test shows nothing"
