"""A request is known from the moment its call is admitted: while its text waits for the tokenizer, it can be aborted,
and nobody else has its id."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.messages import MAX_ANNOUNCED
from runahead.runtime.wire.parameters import FinishReason
from runahead.service.calls.call import Call, CallLog
from runahead.service.completion import events
from runahead.service.settings.settings import SETTINGS
from runahead.service.shared_memory.call_tables import Resource
from runahead.v1 import (
    AbortOutcome,
    AbortRequest,
    GenerateOnceRequest,
    GenerateRequest,
    OutputOptions,
    StoppingOptions,
    TokenIds,
    TokenizeRequest,
)
from runahead.v1 import FinishReason as Reason
from tests.service.calls.test_access import ALICE, BOB, bearer
from tests.service.calls.test_access import reason as reason_of
from tests.service.completion.test_tokenizing import LONG_TEXT, Gate, gate, generate, service, tokenizing_bytes
from tests.service.fake_engine import TIMEOUT_S
from tests.service.rpc_errors import code, failure
from tests.service.running_service import Service
from tests.service.small_tokenizers import byte_level_tokenizer

__all__ = ["gate", "service"]

ABORTED = AbortOutcome.ABORT_OUTCOME_ABORTED


def begin(service: Service, request_id: str, token: str = ALICE, **fields: Any) -> Any:
    """A call whose text is long, once the engine has heard of it."""
    request = GenerateRequest(text=LONG_TEXT, request_id=request_id, **fields)
    call = service.stub.Generate(request, timeout=TIMEOUT_S, metadata=bearer(token))
    assert service.engine.announced.get(timeout=TIMEOUT_S).request_id.endswith(f"/{request_id}")
    return call


def abort(service: Service, **request: Any) -> list[tuple[str, int]]:
    results = service.stub.Abort(AbortRequest(**request), timeout=TIMEOUT_S, metadata=bearer(ALICE)).results
    return [(result.request_id, result.outcome) for result in results]


def held(service: Service) -> list[int]:
    counts: list[int] = service.front_end.servicer._board.held.in_all().tolist()
    return counts


@contextmanager
def ended_calls() -> Iterator[queue.Queue[Call]]:
    """What is known of completions that end in the body."""
    ended: queue.Queue[Call] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLog, "ended", lambda _, call: ended.put(call))
        yield ended


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_completion_that_its_client_leaves_while_its_text_waits_is_counted(
    service: Service, gate: Gate, how: str
) -> None:
    counters = service.front_end.servicer.counters
    with ended_calls() as ended:
        call = begin(service, "r") if how == "cancelled" else generate(service, LONG_TEXT, ALICE, timeout_s=0.5)
        call.cancel() if how == "cancelled" else failure(lambda: list(call))
        code_of = {"cancelled": grpc.StatusCode.CANCELLED, "late": grpc.StatusCode.DEADLINE_EXCEEDED}
        assert ended.get(timeout=TIMEOUT_S).code == code_of[how]
    assert counters.cancelled == 1


@pytest.mark.parametrize("by", ["id", "all"])
@pytest.mark.parametrize("state", ["is being tokenized", "waits"])
def test_an_abort_ends_a_request_whose_text(service: Service, gate: Gate, state: str, by: str) -> None:
    calls = {}
    for number in range(3):  # two threads are held up by two of them
        calls[f"r{number}"] = begin(service, f"r{number}", output=OutputOptions(echo=True))
        gate.until(lambda number=number: len(gate.begun) + gate.waiting == number + 1)  # type: ignore[misc]
    assert (len(gate.begun), gate.waiting) == (2, 1)
    chosen = {"waits": "r2", "is being tokenized": "r0"}[state]
    if by == "id":
        assert abort(service, request_ids=[chosen]) == [(chosen, ABORTED)]
    else:
        assert sorted(abort(service, all=True)) == [(request_id, ABORTED) for request_id in sorted(calls)]
    for request_id in [chosen] if by == "id" else calls:
        accepted, finished = list(calls[request_id])
        assert (accepted.accepted.request_id, accepted.accepted.prompt_tokens) == (request_id, 0)
        assert finished.finished.reason == Reason.FINISH_REASON_ABORTED
        assert finished.finished.usage.completion_tokens == 0
    left = len(LONG_TEXT) * (2 if by == "id" else 0)
    gate.until(lambda: tokenizing_bytes(service) == left)
    gate.open()
    assert service.engine.next_cancel(), "the engine is told that nothing follows"
    if by == "id":
        assert {service.engine.next_submit().request_id for _ in range(2)} == {
            f"alice/{request_id}" for request_id in calls if request_id != chosen
        }
    assert service.engine.submitted.empty()
    assert len(gate.begun) <= 100 * len(calls) - (99 if by == "id" else 297), "its text got no further turn"


def test_generate_once_is_aborted_too(service: Service, gate: Gate) -> None:
    once = GenerateOnceRequest(text=LONG_TEXT, request_id="r")
    call = service.stub.GenerateOnce.future(once, timeout=TIMEOUT_S, metadata=bearer(ALICE))
    service.engine.announced.get(timeout=TIMEOUT_S)
    assert abort(service, request_ids=["r"]) == [("r", ABORTED)]
    answer = call.result()
    assert (answer.finished.reason, answer.text, answer.accepted.prompt_tokens) == (Reason.FINISH_REASON_ABORTED, "", 0)
    assert not any(held(service))


def test_an_id_is_taken_while_its_text_waits_and_free_when_its_call_has_ended(service: Service, gate: Gate) -> None:
    first = begin(service, "r")
    second = begin(service, "r")
    short = GenerateRequest(token_ids=TokenIds(ids=[1]), request_id="r")
    error = failure(lambda: list(second))
    assert (code(error), reason_of(error)) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_ID")
    other = begin(service, "r", BOB)  # another caller's is another
    first.cancel()
    assert service.engine.next_cancel()
    assert service.engine.next_cancel()
    gate.until(lambda: held(service)[Resource.STREAMS] == 1)
    third = service.stub.Generate(short, timeout=TIMEOUT_S, metadata=bearer(ALICE))
    assert next(third).HasField("accepted")
    other.cancel()


def test_a_text_that_was_announced_is_submitted_under_its_handle_and_served(service: Service, gate: Gate) -> None:
    call = begin(service, "r")
    gate.open()
    submit = service.engine.next_submit()
    assert submit.announced and service.engine.preparing == {}
    assert len(submit.prompt) == 4 * 5 * 2000
    service.engine.output(submit.handle, [1], FinishReason.LENGTH)
    events = [event.WhichOneof("event") for event in call]
    assert (events[0], events[-1]) == ("accepted", "finished")
    assert service.engine.cancelled.empty(), "nothing was taken back"


def test_all_times_of_a_completion_begin_when_it_is_announced(
    service: Service, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a stop string ends it, one of them is the engine's and another the front end's."""
    with ended_calls() as ended:
        request = GenerateRequest(text=LONG_TEXT, stopping=StoppingOptions(stop=["l"]))
        call = service.stub.Generate(request, timeout=TIMEOUT_S, metadata=bearer(ALICE))
        announced_at = service.engine.announced.get(timeout=TIMEOUT_S).submitted_at
        assert announced_at is not None
        monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: announced_at + 100.0))
        gate.open()
        submit = service.engine.next_submit()
        service.engine.send(m.Admitted(submit.handle, 0, 5.0))
        service.engine.output(submit.handle, byte_level_tokenizer().encode("hello").ids)
        timing = list(call)[-1].finished.timing
        seen = ended.get(timeout=TIMEOUT_S)
    assert announced_at == seen.submitted
    assert submit.submitted_at is not None and submit.submitted_at > announced_at, "when it was sent"
    assert [part.ToNanoseconds() / 1e9 for part in (timing.queue, timing.first_token)] == pytest.approx([5.0, 100.0])


def test_a_short_text_is_known_at_once_without_an_announcement(service: Service) -> None:
    request = GenerateRequest(text="short", request_id="r")
    next(service.stub.Generate(request, timeout=TIMEOUT_S, metadata=bearer(ALICE)))
    assert not service.engine.next_submit().announced
    assert service.engine.announced.empty()


def test_a_lost_engine_ends_a_request_whose_text_waits_at_once(service: Service, gate: Gate) -> None:
    call = begin(service, "r")
    service.engine.die()
    error = failure(lambda: list(call))
    assert (code(error), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    gate.until(lambda: not any(held(service)))


def test_a_shutdown_ends_a_request_whose_text_waits_with_its_reason(service: Service, gate: Gate) -> None:
    call = begin(service, "r")
    service.stop(grace_s=0.0)
    error = failure(lambda: list(call))
    assert (code(error), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "SHUTDOWN")


def test_a_text_that_fails_takes_its_announcement_back(
    service: Service, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str, add_special_tokens: bool) -> None:
        raise ValueError(text)

    monkeypatch.setattr(gate._tokenizer, "_encode", broken)
    call = begin(service, "r")
    assert code(failure(lambda: list(call))) == grpc.StatusCode.INTERNAL
    assert service.engine.next_cancel()
    monkeypatch.undo()
    tokens = TokenizeRequest(text="x")
    assert service.stub.Tokenize(tokens, timeout=TIMEOUT_S, metadata=bearer(ALICE)).token_ids


def test_the_engine_lets_a_front_end_announce_as_many_as_it_may_have_open() -> None:
    assert SETTINGS["max_streams"].meta.le == MAX_ANNOUNCED
