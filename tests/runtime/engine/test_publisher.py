"""What is sent changes nothing about who lives: whoever ends a request takes it from the live ones."""

from __future__ import annotations

from runahead.runtime.engine.publisher import Publisher
from runahead.runtime.scheduler.outcomes import Ending
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import MemoryLinks, make_chain, no_step


def test_a_request_whose_end_was_sent_lives_until_somebody_removes_it() -> None:
    chain = make_chain(2, schedule=no_step)
    chain.submit(1, [3, 4], max_tokens=5)
    chain.engine.intake.take()
    registry, links = chain.engine.registry, MemoryLinks()
    (tracked,) = registry.all()
    publisher = Publisher(links, chain.engine.scheduler.holdings, chain.device.rings, registry)
    publisher.end(Ending(tracked.request, FinishReason.ABORTED), 1.0)
    assert [type(message) for _, message in links.sent] == [m.Output]
    assert registry.all() == [tracked]
    registry.remove(tracked.request)
    assert not registry.all()
    assert registry.has_finished("r1")
