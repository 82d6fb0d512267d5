"""One simulated replica: when launches run, when tokens come, and what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.figures import Figures
from benchmarks.fleet.replica import Replica
from benchmarks.fleet.traffic import NO_TENANT, Request

DECODE_MS, BASE_MS, TOKEN_MS = 10.0, 10.0, 0.1
FOREVER = 1e9


def costs(**others: int) -> Costs:
    """A launch takes 10 ms, with prompts 10 ms and 0.1 ms a query token."""
    sizes = {"kv_tokens": 10_000, "max_rows": 8, "max_prefill_tokens": 512, "mixed_prefill_tokens": 512, "run_ahead": 2}
    return Costs(
        source="a test", decode_ms=[(1, DECODE_MS)], prompt_ms=(BASE_MS, TOKEN_MS), overhead_ms=0.0,
        longest_prompt=1000, prefill_chunk=256, **{**sizes, **others},
    )  # fmt: skip


def asked(arrived: float, prompt: int = 100, answer: int = 5, tenant: int = NO_TENANT, prefix: int = 0) -> Request:
    return Request(arrived, tenant, prefix, prompt, answer)


def served(requests: Sequence[Request], **others: int) -> tuple[Figures, Replica]:
    """All requests, by one replica."""
    figures = Figures(FOREVER, FOREVER)
    replica = Replica(0, costs(**others), figures)
    for request in requests:
        replica.advance(request.arrived)
        replica.submit(request, request.arrived)
    replica.advance(inf)
    return figures, replica


def test_a_request_alone_has_its_first_token_when_its_prompt_is_computed_and_then_one_a_launch() -> None:
    request = asked(1000.0)
    figures, replica = served([request])
    assert request.first == pytest.approx(1000 + BASE_MS + 100 * TOKEN_MS)
    assert figures.end == pytest.approx(request.first + 4 * DECODE_MS)
    assert (figures.finished, figures.tokens, figures.launches) == (1, 5, 5)
    assert replica.running == 0


@pytest.mark.parametrize(("run_ahead", "later"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_a_request_that_comes_during_a_launch_has_its_prompt_in_the_launch_that_is_planned_next(
    run_ahead: int, later: int
) -> None:
    """A launch is planned when the one `run_ahead` before it starts, so that those between are planned already."""
    late = asked(1055.0)  # rows decode in launches of 10 ms from 1020 on: the launch from 1050 runs
    served([asked(1000.0, answer=50), late], run_ahead=run_ahead)
    begins = 1050 + 10 * (1 + later)
    assert late.first == pytest.approx(begins + BASE_MS + 101 * TOKEN_MS)


def test_many_launches_at_once_are_the_same_as_one_by_one() -> None:
    def requests() -> list[Request]:
        return [asked(37.0 * place, prompt=50 + place, answer=5 + 7 * (place % 9)) for place in range(60)]

    at_once, _ = served(requests())
    figures = Figures(FOREVER, FOREVER)
    replica = Replica(0, costs(), figures)
    waiting = requests()
    for ms in range(4000):
        replica.advance(float(ms))
        while waiting and waiting[0].arrived == ms:
            replica.submit(waiting.pop(0), float(ms))
    replica.advance(inf)
    assert figures.numbers() == at_once.numbers()
    assert at_once.finished == 60


def test_prompts_are_cut_into_chunks_and_no_launch_has_more_tokens_than_it_may() -> None:
    long, short = asked(0.0, prompt=600, answer=1), asked(0.0, prompt=300, answer=1)
    figures, _ = served([long, short])
    # 256 + 256, then 256 + 44, then 88.
    assert short.first == pytest.approx(2 * BASE_MS + 812 * TOKEN_MS)
    assert long.first == pytest.approx(3 * BASE_MS + 900 * TOKEN_MS)
    assert figures.launches == 3


def test_rows_that_decode_bound_the_prompt_tokens_beside_them() -> None:
    def first_tokens(bound: int) -> list[float]:
        late = [asked(1000.0, prompt=200) for _ in range(2)]
        served([asked(0.0, prompt=20, answer=500), *late], mixed_prefill_tokens=bound)
        return [request.first for request in late]

    together, apart = first_tokens(512), first_tokens(256)
    assert together[0] == together[1]
    assert apart[0] < together[0] < apart[1]


def test_a_request_waits_for_a_row_and_for_blocks() -> None:
    first, second = asked(0.0, answer=20), asked(0.0, answer=20)
    served([first, second], max_rows=1)
    assert second.first > first.first + 19 * DECODE_MS
    first, second = asked(0.0, answer=20), asked(0.0, answer=20)
    served([first, second], kv_tokens=200)
    assert second.first > first.first + 19 * DECODE_MS


def test_a_prefix_is_found_once_its_launch_has_ended_and_not_by_requests_planned_before() -> None:
    decoding = asked(0.0, prompt=20, answer=500)
    before, after = ([asked(at, prompt=200, tenant=3, prefix=128) for at in times] for times in ((1005, 1015), (1200,)))
    figures, replica = served([decoding, *before, *after])
    assert (figures.prompt_tokens, figures.cached_tokens) == (620, 128)
    assert [event[1:] for event in replica.prefixes.events] == [(3, True)]


def test_the_prefix_that_was_used_longest_ago_is_evicted() -> None:
    tenants = enumerate((1, 2, 1, 3, 1, 2))
    requests = [asked(1e3 * place, prompt=200, answer=1, tenant=tenant, prefix=160) for place, tenant in tenants]
    figures, replica = served(requests, kv_tokens=500)
    assert [event[1:] for event in replica.prefixes.events][:4] == [(1, True), (2, True), (2, False), (3, True)]
    assert figures.cached_tokens == 2 * 160  # the third and the fifth request
