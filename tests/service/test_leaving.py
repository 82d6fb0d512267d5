"""A client that goes away, or is too late, in each phase of its request.

In the whole service, down to the engine's rows and blocks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from benchmarks.local_service import LocalService, local_service
from runahead.v1 import (
    GenerateRequest,
    GenerationServiceStub,
    ServerStats,
    StatsRequest,
    StoppingOptions,
    TokenIds,
    TokenizeRequest,
)
from tests.service.hostile.bystander import Bystander
from tests.service.raw_http2 import ACK, MAX_WINDOW, SETTINGS, RawClient
from tests.service.rpc_errors import code, failure

TIMEOUT_S = 60.0
ROWS = 2  # one of them is the bystander's to have
# Prompts come in small pieces, so that there is a phase to leave in. Without a prefix cache all blocks come back.
FLAGS = [
    *("--threads", "1", "--num-blocks", "400", "--max-rows", str(ROWS), "--no-prefix-cache"),
    *("--prefill-chunk", "16", "--max-prefill-tokens", "16", "--stalled-stream-s", "600", "--upload-timeout-s", "600"),
]
ENDLESS = StoppingOptions(max_tokens=1_900, ignore_eos=True)
LONG_PROMPT = TokenIds(ids=[5] * 1_900)
UNCUT_TEXT = "a" * (1 << 20)  # a second's work of the tokenizer, in one piece
TRIES = 10  # a request may be in its next phase before its client has left


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with local_service(FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def bystander(service: LocalService) -> Iterator[Bystander]:
    with Bystander(service.url) as connected:
        yield connected


@pytest.fixture
def stub(service: LocalService) -> Iterator[Any]:
    with grpc.insecure_channel(service.url) as channel:
        yield GenerationServiceStub(channel)


def stats_of(stub: Any) -> ServerStats:
    return stub.Stats(StatsRequest(), timeout=TIMEOUT_S).stats


def wait_for(stub: Any, is_so: Callable[[ServerStats], bool]) -> ServerStats:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so(stats := stats_of(stub)):
        assert time.monotonic() < deadline, stats
    return stats


def has_everything(stats: ServerStats) -> bool:
    """Whether nobody has anything: no row, no block, no place, no call."""
    requests, held = stats.requests, stats.held
    return (
        stats.blocks.free == stats.blocks.total
        and stats.rows.free == stats.rows.total
        and not any((requests.waiting, requests.running, requests.preparing))
        and not any((held.queued_tokens, held.tokenizing_bytes, held.uploads, stats.front_end.open_streams))
        and stats.chain.ledger_depth == 0
    )


# ------------------------------------------------------------ who leaves, and when


@contextlib.contextmanager
def a_request(service: LocalService, request: GenerateRequest) -> Iterator[tuple[RawClient, int]]:
    """A connection of its own with this call on it, which ends with the body."""
    with RawClient(service.ports["service"], window=MAX_WINDOW) as client:
        client.frames_until(SETTINGS)
        client.send(SETTINGS, flags=ACK)
        stream = client.begin("Generate")
        client.message(stream, request.SerializeToString(), ends=True)
        yield client, stream


@contextlib.contextmanager
def all_rows_taken(stub: Any) -> Iterator[None]:
    calls = [
        stub.Generate(GenerateRequest(token_ids=TokenIds(ids=[5, 6]), stopping=ENDLESS), timeout=TIMEOUT_S)
        for _ in range(ROWS)
    ]
    for call in calls:
        assert [next(call).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
    try:
        yield
    finally:
        for call in calls:
            call.cancel()


def leaves_while_it_waits(service: LocalService, stub: Any, before: ServerStats) -> None:
    with all_rows_taken(stub), a_request(service, GenerateRequest(text="x", stopping=ENDLESS)):
        wait_for(stub, lambda stats: stats.requests.waiting == 1)


def leaves_in_its_prompt(service: LocalService, stub: Any, before: ServerStats) -> None:
    with a_request(service, GenerateRequest(token_ids=LONG_PROMPT, stopping=StoppingOptions(max_tokens=100))):
        wait_for(stub, lambda stats: stats.tokens.prefill_chunks > before.tokens.prefill_chunks)


def leaves_among_its_tokens(service: LocalService, stub: Any, before: ServerStats) -> None:
    with a_request(service, GenerateRequest(text="x", stopping=ENDLESS)) as (client, stream):
        client.messages_of(stream, 3)


def leaves_while_its_text_waits(service: LocalService, stub: Any) -> tuple[ServerStats, ServerStats]:
    """What is said before it comes and when it has gone. On a busy machine the other texts may be done before its own
    comes: then that is refused, since it is too long, before the client has left."""

    def gone(stats: ServerStats) -> int:
        return stats.front_end.cancelled + stats.front_end.refused

    before = wait_for(stub, has_everything)
    busy = [stub.Tokenize.future(TokenizeRequest(text=UNCUT_TEXT), timeout=TIMEOUT_S) for _ in range(4)]
    with a_request(service, GenerateRequest(text="a" * 50_000)):
        wait_for(
            stub,
            lambda stats: stats.requests.preparing == 1 or gone(stats) > gone(before),
        )
    for call in busy:
        call.cancel()
    return before, wait_for(stub, lambda stats: has_everything(stats) and gone(stats) > gone(before))


LEAVES: dict[str, Callable[[LocalService, Any, ServerStats], None]] = {
    "WAITING": leaves_while_it_waits,
    "PREFILL": leaves_in_its_prompt,
    "DECODE": leaves_among_its_tokens,
}


@pytest.mark.parametrize("phase", LEAVES)
def test_a_client_whose_connection_ends_leaves_nothing_behind(
    service: LocalService, stub: Any, bystander: Bystander, phase: str
) -> None:
    before = wait_for(stub, has_everything)
    for _ in range(TRIES):
        LEAVES[phase](service, stub, before)
        after = wait_for(stub, has_everything)
        if after.lifecycle.aborted[phase] > before.lifecycle.aborted[phase]:
            break
    assert after.lifecycle.aborted[phase] > before.lifecycle.aborted[phase], "it was in this phase when it left"
    assert after.front_end.cancelled > before.front_end.cancelled
    if phase == "WAITING":
        assert after.requests.submitted - before.requests.submitted > after.requests.admitted - before.requests.admitted
    bystander.first_tokens_s(1)


def test_a_client_that_leaves_while_its_text_waits_is_unknown_to_the_engine_again(
    service: LocalService, stub: Any, bystander: Bystander
) -> None:
    for _ in range(TRIES):
        before, after = leaves_while_its_text_waits(service, stub)
        if after.front_end.cancelled > before.front_end.cancelled:
            break
    assert after.front_end.cancelled == before.front_end.cancelled + 1, "its text waited when it left"
    assert after.requests.submitted == before.requests.submitted
    bystander.first_tokens_s(1)


def test_a_request_whose_time_is_over_while_it_waits_never_runs(
    service: LocalService, stub: Any, bystander: Bystander
) -> None:
    before = wait_for(stub, has_everything)
    with all_rows_taken(stub):
        late = GenerateRequest(text="x", stopping=StoppingOptions(max_tokens=1))
        error = failure(lambda: list(stub.Generate(late, timeout=0.5)))
        assert code(error) == grpc.StatusCode.DEADLINE_EXCEEDED
        stats = wait_for(stub, lambda stats: stats.requests.waiting == 0)
        assert stats.requests.submitted == before.requests.submitted + ROWS + 1, "the engine had it"
        assert stats.lifecycle.aborted["WAITING"] == before.lifecycle.aborted["WAITING"] + 1
    after = wait_for(stub, has_everything)
    assert after.requests.admitted == before.requests.admitted + ROWS, "it had no row"
    bystander.first_tokens_s(1)
