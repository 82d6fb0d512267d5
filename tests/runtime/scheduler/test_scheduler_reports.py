"""What the scheduler says of what it did: counts of ends from outside, and where a launch leaves log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from runahead.runtime.memory.block_pool import NO_SLOT
from runahead.runtime.scheduler.ledger import Launch
from runahead.runtime.scheduler.outcomes import PromptLogprobRange
from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason, SamplingParams
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.pressure import request_of, whole
from tests.runtime.scheduler.played import Played

DEPTHS = [0, 1, 2, 4]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_by_a_stop_string_is_an_event_like_other_ends(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in (1, 2):
        chain.submit(handle, [3, 4], max_tokens=50, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.tell(m.Cancel(1, FinishReason.STOP))
    chain.run()
    assert chain.engine.stats().events["finished"].count == 2


@pytest.mark.parametrize("depth", DEPTHS)
def test_aborts_in_the_same_phase_are_all_counted(depth: int) -> None:
    chain = make_chain(depth, max_rows=1)
    for handle in range(1, 5):
        chain.submit(handle, [3, 4], max_tokens=20, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    chain.tell(m.Abort(1, ("r2", "r3", "r4")))
    chain.turn()
    chain.submit(5, [3, 4], max_tokens=20, ignore_eos=True)
    chain.run()
    stats = chain.engine.stats()
    assert stats.aborted == {"WAITING": 3}
    assert stats.events["aborted"].count == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_of_every_hit_are_counted(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    for handle in (1, 2, 3):
        chain.submit(handle, [3] * 20, max_tokens=2, ignore_eos=True)
        chain.run()
    assert [chain.admitted()[handle].cached_tokens for handle in (1, 2, 3)] == [0, 16, 16]
    assert chain.engine.stats().cached_tokens == 32


def evict_at(chain: Chain, least_len: int) -> Request:
    """Evict request 1 when the launches enqueued make it this long, and wait until it has a row again."""
    request, rows = request_of(chain, 1), chain.engine.scheduler.rows
    evictions = request.evictions
    chain.turn_until(lambda: rows.least_len[request.row_slot] == least_len)
    chain.engine.scheduler.evict(request)
    chain.turn_until(lambda: request.evictions > evictions and request.row_slot != NO_SLOT)
    assert request.computed == least_len
    return request


@pytest.mark.parametrize("depth", DEPTHS)
def test_tokens_of_every_eviction_are_counted_as_recomputed(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step, prefix_cache=False)
    chain.submit(1, [3] * 17, max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    for least_len in (28, 37):
        evict_at(chain, least_len)
    chain.run()
    assert chain.engine.stats().recomputed_tokens == 28 + 37
    assert chain.tokens()[1] == whole([3] * 17, 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_nothing_is_recomputed_where_every_block_is_found(depth: int) -> None:
    chain = make_chain(depth, schedule=no_step)
    chain.submit(1, [3] * 17, max_tokens=40, ignore_eos=True)
    chain.turn_until(lambda: chain.tokens())
    assert 8 * evict_at(chain, 32).shared == 32
    chain.run()
    assert chain.engine.stats().recomputed_tokens == 0
    assert chain.tokens()[1] == whole([3] * 17, 40)


def parts_of(chain: Chain) -> list[PromptLogprobRange]:
    """Filled while the chain runs: the parts of every launch, in order."""
    enqueue, parts = chain.ledger.enqueue, list[PromptLogprobRange]()

    def watched(launch: Launch) -> None:
        parts.extend(launch.prompt_logprob_ranges)
        enqueue(launch)

    chain.ledger.enqueue = watched  # type: ignore[method-assign]
    return parts


def test_a_launch_leaves_an_entry_for_every_prompt_token_whose_next_one_is_known() -> None:
    chain = make_chain(2, schedule=no_step)
    parts = parts_of(chain)
    chain.submit(1, [3] * 40, max_tokens=2, sampling=SamplingParams(prompt_logprobs=0))
    chain.run()
    assert [(part.start, part.first_entry, part.count) for part in parts] == [(0, 0, 16), (16, 0, 16), (32, 0, 7)]


def test_entries_of_a_chunk_come_after_all_query_tokens_of_the_rows_before_it() -> None:
    played = Played(drafts=3)
    played.submit(1, 3, 30)
    for _ in range(2):
        played.launch()
        played.commit()
    request = played.submit(2, 20, 5)
    request.sampling = SamplingParams(prompt_logprobs=0)
    played.launch()
    played.launch()
    parts = [part for launch in played.ledger.launches() for part in launch.prompt_logprob_ranges]
    assert [(part.start, part.first_entry, part.count) for part in parts] == [(0, 4, 16), (16, 4, 3)], (
        "the row before it has a token and three drafts"
    )
    assert np.count_nonzero([part.row_slot for part in parts]) == 2
