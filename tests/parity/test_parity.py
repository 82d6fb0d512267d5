"""Every depth gives the tokens, log-probabilities and finish reasons of `serial`, to the bit, through the real service.

The servers run the CPU device's test mode: seeded delays between host and device, and poison in whatever is given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.parity.client import Answer
from tests.parity.comparing import compare
from tests.parity.figures import check_at_rest, check_depth, counted, grown
from tests.parity.matrix import EVENTS, Run, saw_depth, saw_kind, workload_of
from tests.parity.request_kinds import KINDS
from tests.parity.services import (
    BLOCK,
    DEPTHS,
    depths_of,
    figures_everywhere,
    run_everywhere,
    services_at_every_depth,
)
from tests.parity.workload import Asked, kinds, workload

pytestmark = pytest.mark.timeout(0)  # each workload has its own

ATTEMPTS = 6
LOG_INTERVAL = 8
POOLS = {
    "roomy": ("--num-blocks", "257", "--log-interval", str(LOG_INTERVAL), "--log-mode", "events"),
    "tight": ("--num-blocks", "29"),  # not all of what the rows of a workload need
    "barrier": ("--num-blocks", "257", "--log-interval", str(LOG_INTERVAL), "--log-mode", "barrier"),
}
BARRIER_INTERVAL = {"roomy": 0, "tight": 0, "barrier": LOG_INTERVAL}


def _services(pool: str, depths: Sequence[str]) -> Iterator[dict[str, str]]:
    """URLs by depth."""
    flags = ["--threads", "1", *POOLS[pool]]
    with services_at_every_depth(lambda i: [*flags, "--jitter-seed", str(7 + i)], depths) as urls:
        yield urls


@pytest.fixture(scope="module")
def roomy(large: bool) -> Iterator[dict[str, str]]:
    yield from _services("roomy", DEPTHS if large else ("serial", "2", "4"))


@pytest.fixture(scope="module")
def tight(large: bool) -> Iterator[dict[str, str]]:
    yield from _services("tight", depths_of(large=large))


@pytest.fixture(scope="module")
def barrier(large: bool) -> Iterator[dict[str, str]]:
    yield from _services("barrier", depths_of(large=large))


# ---------------------------------------------------------------- the matrix


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_of_the_matrix_has_the_answers_of_serial_in_a_roomy_pool(
    kind: str, event: str, roomy: dict[str, str], request: pytest.FixtureRequest
) -> None:
    pool = EVENTS[event].pool
    services = {(pool, depth): url for depth, url in request.getfixturevalue(pool).items()}
    services["roomy", "serial"] = roomy["serial"]
    for attempt in range(ATTEMPTS):
        runs = asyncio.run(run_cell(kind, event, attempt, services))
        compare_runs(event, runs)
        seen = {
            where: {**EVENTS[event].witness(run), **saw_kind(run), **saw_depth(run)}
            for where, run in runs.items()
            if where[0] == pool
        }
        print(f"\n{kind} / {event}: " + table(list(seen.values())))
        if all(count > 0 for happened in seen.values() for count in happened.values()):
            return
    pytest.fail(f"not everything that the cell is about happened in any of {ATTEMPTS} attempts: {seen}")


async def run_cell(
    kind: str, event: str, attempt: int, services: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], Run]:
    """One attempt at a cell on services by pool and depth."""
    asked = workload_of(kind, event, attempt)
    before = await figures_everywhere(services)
    answers = await run_everywhere(services, asked)
    after = await figures_everywhere(services)
    for pool, depth in services:
        check_at_rest(after[pool, depth], BARRIER_INTERVAL[pool])
    return {where: Run(kind, where[1], asked, answers[where], grown(before[where], after[where])) for where in services}


def compare_runs(event: str, runs: Mapping[tuple[str, str], Run]) -> None:
    """Each run with that of serial in the roomy pool, and twins with each other."""
    expected = runs["roomy", "serial"]
    for (pool, depth), run in runs.items():
        for item, ours, theirs in zip(run.asked, expected.answers, run.answers, strict=True):
            compare(item, ours, theirs, f"{pool} pool, depth {depth}, request {item.request.request_id}")
        for first, again in EVENTS[event].twins:
            where = f"{pool} pool, depth {depth}, request {first} and again as {again}"
            compare(run.asked[again], run.answers[first], run.answers[again], where)


def table(seen: Sequence[Mapping[str, int]]) -> str:
    """What was seen, each with its count at every depth."""
    names = dict.fromkeys(name for happened in seen for name in happened)
    return "; ".join(f"{name} {' '.join(str(happened.get(name, '-')) for happened in seen)}" for name in names)


def test_kinds_of_requests_differ_where_they_should_and_nowhere_else(roomy: dict[str, str]) -> None:
    """Requests at odd places are drawn, those at even ones greedy, but for the kinds where all are one or the other."""
    tokens = {}
    for kind in KINDS:
        asked = workload_of(kind, "logging-barrier", ATTEMPTS)
        answers = asyncio.run(run_everywhere({"4": roomy["4"]}, asked))["4"]
        tokens[kind] = [answer.tokens for answer in answers]
    greedy, drawn = tokens["greedy"], tokens["seeded-sampling"]
    assert all(ours != theirs for ours, theirs in zip(greedy, drawn, strict=True)), "a draw took the likeliest tokens"
    for kind in ("logprobs", "prompt-logprobs"):
        assert tokens[kind][0::2] == greedy[0::2]
        assert tokens[kind][1::2] == drawn[1::2]
    changed = sum(ours != theirs for ours, theirs in zip(tokens["penalties"], tokens["logprobs"], strict=True))
    assert changed >= 3, f"penalties changed {changed} of {len(greedy)} completions"
    assert tokens["stop-strings"][2::2] == greedy[2::2]
    ended = tokens["stop-strings"][0]
    assert len(ended) < len(greedy[0])
    assert ended == greedy[0][: len(ended)]


# ---------------------------------------------------------------- random workloads


def test_every_depth_gives_the_answers_of_serial_to_random_workloads(tight: dict[str, str], seeds: range) -> None:
    asked_for: Counter[str] = Counter()
    happened: dict[str, Counter[str]] = {depth: Counter() for depth in tight}
    before = asyncio.run(figures_everywhere(tight))
    for seed in seeds:
        asked = workload(seed)
        asked_for.update(kinds(asked))  # keeps what was never asked for, at zero
        answers = asyncio.run(run_everywhere(tight, asked))
        for depth in tight:
            happened[depth].update(events(asked, answers[depth]))
            for item, serial, other in zip(asked, answers["serial"], answers[depth], strict=True):
                compare(item, serial, other, f"seed {seed}, depth {depth}, request {item.request.request_id}")
    after = asyncio.run(figures_everywhere(tight))
    for depth in tight:
        check_at_rest(after[depth], 0)
        check_depth(after[depth], depth)
        since = grown(before[depth], after[depth])
        happened[depth].update({name: since[name] for name in COUNTED})
    print("\nasked for: " + ", ".join(f"{name} {count}" for name, count in asked_for.items()))
    print("happened, at depths " + ", ".join(tight) + ": " + table(list(happened.values())))
    assert all(asked_for.values()), asked_for
    # When a row asks for a block of the small pool depends on timing; the cells force each event at each depth.
    assert all(any(counts[name] for counts in happened.values()) for name in happened["serial"]), happened
    for depth, counts in happened.items():
        rows = counts["generated tokens"] / counts["launches"]  # fewer where this process has asked late
        assert rows > 2.5, f"{rows:.2f} rows were live on average"
        if depth == "serial":
            assert counted(after[depth])["overlapped launches"] == 0
        else:
            assert counts["overlapped launches"] > 0  # how many hangs on how fast this machine is
            assert counts["void rows"] > 0
    if "1" in tight:  # in `make parity`
        assert wasted_more(happened["4"], happened["1"]), "as if a chain of 4 were no deeper than one of 1"


def wasted_more(deeper: Counter[str], shallower: Counter[str]) -> bool:
    """The deeper a chain is, the more rows an end wastes that nobody could foresee."""
    return deeper["void rows"] > shallower["void rows"]


CHAINED = ("overlapped launches", "void rows")  # in a chain, and not in serial
COUNTED = (
    "launches", "launches at the full depth",
    "generated tokens", "chunks", "cached tokens", "recomputed tokens", "reserved blocks", "adopted blocks",
    "admitted to a running chain", "paused", "resumed", "evicted", "readmitted", *CHAINED,
)  # fmt: skip


def events(asked: list[Asked], answers: list[Answer]) -> Counter[str]:
    """How often each kind of event happened in one run of a workload, as its answers tell."""
    counts: Counter[str] = Counter()
    for reason in ("END_OF_SEQUENCE", "STOP", "LENGTH", "CONTEXT_LENGTH", "ABORTED"):
        counts[reason] = sum(answer.reason == reason for answer in answers)
    for item, answer in zip(asked, answers, strict=True):
        counts["stop string met"] += answer.stop in tuple(item.request.stopping.stop)
        counts["stop token met"] += answer.reason == "STOP" and answer.stop not in tuple(item.request.stopping.stop)
        counts["cancelled"] += answer.cancelled
        counts["aborted in the queue or the prompt"] += answer.reason == "ABORTED" and not answer.tokens
        counts["aborted while decoding"] += answer.reason == "ABORTED" and bool(answer.tokens)
        counts["block boundaries crossed"] += len(answer.tokens) // BLOCK
        counts["cached prefixes"] += answer.cached_tokens > 0
    return counts
