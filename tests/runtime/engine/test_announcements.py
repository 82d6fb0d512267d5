"""A request whose prompt is still being prepared: its id is known, and nothing else is held for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import Chain, make_chain
from tests.runtime.engine.hostile_wire import Wire, submit
from tests.runtime.programs.hash_model import completion

PROMPT = [3, 4, 5]


def announced(chain: Chain, handle: int, request_id: str = "", owner: int = 1) -> None:
    chain.tell(m.Announce(handle, request_id or f"r{handle}"), owner=owner)
    chain.turn()


def take_its_place(chain: Chain, handle: int, request_id: str = "", owner: int = 1) -> None:
    """The prompt is there."""
    chain.submit(handle, PROMPT, owner=owner, request_id=request_id, announced=True, max_tokens=10, ignore_eos=True)


def said(chain: Chain, handle: int, owner: int = 1) -> list[str]:
    """What was said of a request, in order, by the names of the messages and of ends."""
    words: list[str] = []
    for to, message in chain.links.sent:
        if to == owner and getattr(message, "handle", None) == handle:
            words.append(type(message).__name__)
        if to == owner and isinstance(message, m.Output):
            words += [FinishReason(end.reason).name for end in message.finished if end.handle == handle]
    return words


def outcomes(chain: Chain) -> list[str]:
    """Of the newest abort."""
    *_, newest = (message for _, message in chain.links.sent if isinstance(message, m.AbortResult))
    return [f"{request_id} {outcome}" for request_id, outcome in zip(newest.request_ids, newest.outcomes, strict=True)]


def test_a_request_that_was_announced_is_served_as_any_other() -> None:
    chain = make_chain()
    announced(chain, 1)
    assert chain.engine.stats().preparing == 1 and said(chain, 1) == []
    assert chain.quiet, "nothing waits for it"
    take_its_place(chain, 1)
    chain.run()
    assert chain.tokens()[1] == completion(PROMPT, 0, 10, stops=())
    assert said(chain, 1) == ["Accepted", "Admitted", "LENGTH"]
    assert chain.engine.stats().preparing == 0
    chain.check_nothing_is_left()


@pytest.mark.parametrize("all_requests", [False, True])
def test_an_abort_from_another_front_end_ends_it_and_its_prompt_comes_to_nothing(all_requests: bool) -> None:
    chain = make_chain()
    announced(chain, 1)
    chain.submit(2, PROMPT, max_tokens=50, ignore_eos=True)
    chain.turn()
    chain.tell(m.Abort(5, () if all_requests else ("r1", "r2"), all_requests), owner=2)
    chain.run()
    assert sorted(outcomes(chain)) == ["r1 ABORTED", "r2 ABORTED"]
    assert said(chain, 1) == ["Accepted", "ABORTED"]
    take_its_place(chain, 1)
    chain.run()
    assert said(chain, 1) == ["Accepted", "ABORTED"], "what was under way when it ended is nobody's"
    stats = chain.engine.stats()
    assert (stats.preparing, stats.submitted, stats.aborted["PREPARING"]) == (0, 1, 1)
    chain.tell(m.Abort(6, ("r1",)))
    chain.run()
    assert outcomes(chain) == ["r1 ALREADY_FINISHED"]
    chain.check_nothing_is_left()


def test_all_means_those_whose_ids_begin_as_it_says() -> None:
    chain = make_chain()
    announced(chain, 1, "alice/x")
    announced(chain, 2, "bob/x")
    chain.tell(m.Abort(5, (), all_requests=True, reach="bob/"), owner=2)
    chain.run()
    assert outcomes(chain) == ["bob/x ABORTED"]
    assert (said(chain, 1), said(chain, 2)) == ([], ["Accepted", "ABORTED"])


def test_nobody_else_gets_an_id_that_is_announced_or_announces_one_that_is_served() -> None:
    chain = make_chain()
    announced(chain, 1, "x")
    for handle, owner in ((2, 1), (7, 2)):
        announced(chain, handle, "x", owner)
        chain.submit(handle + 1, PROMPT, owner=owner, request_id="x", max_tokens=5)
        chain.run()
        for refused in (handle, handle + 1):
            assert said(chain, refused, owner) == ["Refused"]
    assert {refused.code for owner in (1, 2) for refused in chain.refused(owner)} == {"ALREADY_EXISTS"}
    take_its_place(chain, 1, "x")
    chain.turn()
    announced(chain, 9, "x", owner=2)
    assert said(chain, 9, 2) == ["Refused"]
    chain.run()
    assert said(chain, 1)[-1] == "LENGTH"
    announced(chain, 10, "x", owner=2)
    assert said(chain, 10, 2) == [], "it has ended, and its id is free"


def test_a_front_end_that_is_gone_takes_its_announcements_with_it() -> None:
    chain = make_chain()
    for handle in (1, 2):
        announced(chain, handle)
    announced(chain, 1, "other", owner=2)
    chain.tell(None, owner=1)
    chain.run()
    assert chain.engine.stats().preparing == 1
    announced(chain, 2, "r1", owner=2)
    take_its_place(chain, 2, "r1", owner=2)
    chain.run()
    assert said(chain, 2, 2) == ["Accepted", "Admitted", "LENGTH"]


def test_a_cancel_takes_it_back() -> None:
    chain = make_chain()
    announced(chain, 1)
    chain.tell(m.Cancel(1))
    chain.run()
    assert chain.engine.stats().preparing == 0
    chain.tell(m.Abort(5, ("r1",)))
    chain.run()
    assert outcomes(chain) == ["r1 NOT_FOUND"]


def test_one_that_was_aborted_before_it_was_announced_ends_with_that() -> None:
    chain = make_chain()
    chain.tell(m.Abort(5, ("r1",)))
    chain.turn()
    announced(chain, 1)
    assert said(chain, 1) == ["Accepted", "ABORTED"]
    assert chain.engine.stats().preparing == 0


# ------------------------------------------------------------ over the socket


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.close()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((m.Announce(1, "a"), m.Announce(1, "b")), "an Announce has handle 1, and 1 was there before"),
        ((m.Announce(2, "a"), m.Announce(1, "b")), "an Announce has handle 1, and 2 was there before"),
        ((m.Announce(2, "a"), submit(2)), "a Submit has handle 2, and 2 was there before"),
        ((msgspec.structs.replace(submit(1), announced=True),), "as if it had been announced"),
        (
            (m.Announce(1, "a"), m.Cancel(1), msgspec.structs.replace(submit(1), announced=True)),
            "a Submit has handle 1, as if it had been announced",
        ),
        (tuple(m.Announce(handle, f"a{handle}") for handle in (1, 2, 3, 4)), "more than 3 requests at once"),
    ],
)
def test_a_front_end_that_does_not_keep_to_its_word_is_gone_with_what_it_announced(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, messages: tuple[m.ToEngine, ...], words: str
) -> None:
    monkeypatch.setattr(m, "MAX_ANNOUNCED", 3)
    for message in messages:
        wire.hostile.say(message)
    wire.check_hostile_is_gone()
    (reason,) = wire.reasons
    assert words in reason
    wire.check_bystander()
    assert wire.engine.stats().preparing == 0


def test_announcements_that_are_ended_do_not_count_for_the_bound(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_ANNOUNCED", 3)
    for handle in range(1, 10):
        wire.hostile.say(m.Announce(handle, f"a{handle}"))
        wire.hostile.say(m.Cancel(handle))
    wire.hostile.say(m.Announce(10, "a10"))
    wire.turn_until(lambda: wire.engine.stats().preparing)
    assert not wire.reasons and not wire.hostile.lost


def test_a_later_request_may_be_submitted_before_one_that_was_announced(wire: Wire) -> None:
    wire.hostile.say(m.Announce(1, "a"))
    wire.hostile.say(submit(2))
    wire.hostile.say(msgspec.structs.replace(submit(1), request_id="a", announced=True))
    wire.turn_until(lambda: wire.hostile.has_finished)
    assert not wire.reasons
