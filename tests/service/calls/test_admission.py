"""Who is let in, and what those are told who are not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.service.calls.admission import Admission, _address
from runahead.service.contract.errors import ServiceError
from runahead.service.settings.server_config import ServerConfig, check_server_config, limits_of
from runahead.service.settings.settings import FrontEndSettings
from runahead.service.shared_memory.board import Board
from runahead.service.shared_memory.call_tables import Resource

LIMITED = FrontEndSettings(
    max_streams=10,
    max_caller_streams=3,
    max_queued_tokens=1000,
    max_caller_queued_tokens=300,
    max_tokenizing_bytes=5000,
    max_caller_tokenizing_bytes=2000,
    max_uploads=6,
    max_caller_uploads=4,
)
NAMES = {
    Resource.STREAMS: ("STREAMS_LIMIT", "streams"),
    Resource.QUEUED_TOKENS: ("QUEUED_TOKENS_LIMIT", "queued_tokens"),
    Resource.TOKENIZING_BYTES: ("TOKENIZING_LIMIT", "tokenizing_bytes"),
    Resource.UPLOADS: ("UPLOADS_LIMIT", "uploads"),
    Resource.CONTROL_UPLOADS: ("UPLOADS_LIMIT", "uploads"),
}


class Front:
    """A front end's admission, of a board with several."""

    def __init__(self, board: Board, index: int = 0, settings: FrontEndSettings = LIMITED) -> None:
        self.now = 0.0
        self.admission = Admission(
            limits_of(settings, callers_have_names=True), board, board.line(index), lambda: self.now
        )

    def hold(self, stack: ExitStack, name: str, resource: Resource, amount: int) -> Any:
        return stack.enter_context(self.admission.holding(self.admission.account_of(name), {resource: amount}))

    def refusal(self, name: str, resource: Resource, amount: int) -> ServiceError:
        with pytest.raises(ServiceError) as refused:
            self.admission.require(self.admission.account_of(name), {resource: amount})
        return refused.value


def violation_of(error: ServiceError) -> Any:
    (quota,) = (found for found in error.details if isinstance(found, error_details_pb2.QuotaFailure))
    (violation,) = quota.violations
    return violation


# ------------------------------------------------------------ the rule


@pytest.mark.parametrize("resource", list(Resource))
def test_one_caller_has_its_limit_over_all_front_ends_and_another_is_let_in(resource: Resource) -> None:
    board = Board(2)
    one, other = Front(board, 0), Front(board, 1)
    why, name = NAMES[resource]
    most = getattr(LIMITED, f"max_caller_{name}")
    with ExitStack() as held:
        for front, amount in ((one, most // 2), (other, most - most // 2)):
            front.hold(held, "alice", resource, amount)
        for front in (one, other):
            refused = front.refusal("alice", resource, 1)
            violation = violation_of(refused)
            assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (refused.reason, violation.subject) == (f"CALLER_{why}", "caller:alice")
            assert (violation.quota_id, violation.quota_value) == (f"max_caller_{name}", most)
            assert f"the caller's limit is {most} (max_caller_{name})" in refused.sentence
            front.admission.require(front.admission.account_of("bob"), {resource: 1})
    one.admission.require(one.admission.account_of("alice"), {resource: most})


@pytest.mark.parametrize("resource", list(Resource))
def test_all_callers_together_have_the_service_s_limit(resource: Resource) -> None:
    board = Board(2)
    one, other = Front(board, 0), Front(board, 1)
    why, name = NAMES[resource]
    most = getattr(LIMITED, f"max_{name}")
    with ExitStack() as held:
        for number, front in zip(range(most), [one, other] * most, strict=False):
            front.hold(held, f"caller {number % 500}", resource, 1)
        refused = other.refusal("caller 1", resource, 1)
        violation = violation_of(refused)
        assert (refused.reason, violation.subject) == (why, "server")
        assert (violation.quota_id, violation.quota_value) == (f"max_{name}", most)
    other.admission.require(other.admission.account_of("caller 1"), {resource: 1})


def test_what_a_front_end_that_died_held_is_given_back() -> None:
    board = Board(2)
    one, other = Front(board, 0), Front(board, 1)
    with ExitStack() as held:
        one.hold(held, "alice", Resource.STREAMS, 3)
        assert other.refusal("alice", Resource.STREAMS, 1).reason == "CALLER_STREAMS_LIMIT"
        board.clear(0)
        other.admission.require(other.admission.account_of("alice"), {Resource.STREAMS: 3})


@pytest.mark.parametrize("amount", [301, 1001, 10**9])
def test_who_holds_nothing_is_let_in_however_much_it_is_and_is_then_alone(amount: int) -> None:
    """Else a prompt that is longer than a limit would never be served."""
    front = Front(Board())
    with ExitStack() as held:
        front.hold(held, "alice", Resource.QUEUED_TOKENS, amount)
        assert front.refusal("alice", Resource.QUEUED_TOKENS, 1).reason == "CALLER_QUEUED_TOKENS_LIMIT"


def test_a_call_that_wants_nothing_of_a_resource_is_not_refused_for_want_of_it() -> None:
    front = Front(Board())
    with ExitStack() as held:
        front.hold(held, "alice", Resource.TOKENIZING_BYTES, 10_000)
        front.admission.require(front.admission.account_of("alice"), {Resource.TOKENIZING_BYTES: 0})


@pytest.mark.parametrize("has_names", [True, False])
def test_a_caller_without_a_limit_has_half_and_where_callers_have_no_names_all(has_names: bool) -> None:
    for limit in limits_of(FrontEndSettings(), callers_have_names=has_names).values():
        assert limit.of_a_caller == (limit.in_all // 2 if has_names else limit.in_all)
    one = FrontEndSettings(max_streams=1)
    assert limits_of(one, callers_have_names=True)[Resource.STREAMS].of_a_caller == 1


@pytest.mark.parametrize("name", ["streams", "queued_tokens", "tokenizing_bytes", "uploads"])
def test_a_caller_who_may_have_more_than_there_is_is_refused_at_the_start(name: str) -> None:
    chosen: dict[str, Any] = {f"max_{name}": 7, f"max_caller_{name}": 8}
    with pytest.raises(ConfigError, match=f"max_caller_{name} 8 is more than .* max_{name} 7"):
        check_server_config(ServerConfig(EngineConfig(model="x"), FrontEndSettings(**chosen)))


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4711", "2001:db8:1:2::"),
        ("ipv6:[2001:db8:1:2:9::9]:1", "2001:db8:1:2::"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:99", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", "fe80::"),
        ("ipv6:%5B::1%5D:5", "::"),
        ("unix:/tmp/socket", "unix"),
        ("ipv4:", "ipv4"),
        ("", ""),
    ],
)
def test_a_caller_without_a_name_is_its_address_without_the_port(peer: str, address: str) -> None:
    assert _address(peer) == address


def test_a_name_that_looks_like_an_address_is_somebody_else() -> None:
    admission = Front(Board()).admission
    assert admission.account_of("10.0.0.1").number != admission.account_of("", "10.0.0.1").number
    assert admission.account_of("", "10.0.0.1").subject == "caller", "an address is not shown"


# ------------------------------------------------------------ when to come back


def measured(front: Front, resource: Resource, amount: int, every_s: float, times: int = 40) -> None:
    """So much is given back each time, and there is always more."""
    with ExitStack() as held:
        front.hold(held, "somebody", resource, 1)
        for _ in range(times):
            front.admission.measure()
            with ExitStack() as some:
                front.hold(some, "other", resource, amount)
            front.now += every_s
        front.admission.measure()


def test_the_time_to_come_back_is_what_is_queued_over_the_measured_rate() -> None:
    front = Front(Board())
    measured(front, Resource.QUEUED_TOKENS, 100, every_s=1.0)
    with ExitStack() as held:
        front.hold(held, "alice", Resource.QUEUED_TOKENS, 300)
        refused = front.refusal("alice", Resource.QUEUED_TOKENS, 1)
        assert refused.retry_s == pytest.approx(3.0, rel=0.05)
        front.hold(held, "bob", Resource.QUEUED_TOKENS, 300)
        assert front.admission.queue_full("full", 4).retry_s == pytest.approx(6.0, rel=0.05)


def test_for_a_stream_s_place_one_has_to_end_and_the_queue_has_to_go() -> None:
    front = Front(Board())
    measured(front, Resource.STREAMS, 1, every_s=2.0)
    measured(front, Resource.QUEUED_TOKENS, 100, every_s=1.0)
    with ExitStack() as held:
        front.hold(held, "alice", Resource.STREAMS, 3)
        assert front.refusal("alice", Resource.STREAMS, 1).retry_s == pytest.approx(2.0, rel=0.15)
        front.hold(held, "bob", Resource.QUEUED_TOKENS, 1000)
        assert front.refusal("alice", Resource.STREAMS, 1).retry_s == pytest.approx(10.0, rel=0.1)


def test_the_rate_is_that_of_all_front_ends() -> None:
    board = Board(2)
    one, other = Front(board, 0), Front(board, 1)
    with ExitStack() as held:
        one.hold(held, "alice", Resource.QUEUED_TOKENS, 250)
        for _ in range(10):
            other.admission.measure()
            with ExitStack() as some:
                one.hold(some, "bob", Resource.QUEUED_TOKENS, 50)
            other.now += 1.0
        other.admission.measure()
        assert other.refusal("alice", Resource.QUEUED_TOKENS, 100).retry_s == pytest.approx(5.0, rel=0.05)
