"""Blocks for a border that a launch will cross: two rows, each crossing or not, each with its own fate meanwhile.

A row reserves a block with the launch that samples its first token beyond the border. While that launch's tokens are
not committed, the row goes on, ends with that very token, is aborted, or is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from runahead.runtime.scheduler.request import Request
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.parameters import FinishReason
from tests.runtime.chain import Chain, make_chain, no_step
from tests.runtime.programs.hash_model import completion

MAX_TOKENS = 20
BORDER = 5  # the launch that samples the fourth token: that of position 16 after a prompt of 13, of 12 after one of 9
PROMPT_TOKENS = {True: 13, False: 9}  # in two blocks of 8
FATES = ("goes on", "finishes", "is aborted", "is evicted")


@dataclass(frozen=True)
class Row:
    handle: int
    crosses: bool
    fate: str

    @property
    def blocks(self) -> int:
        """Held once the border's launch is planned."""
        return 2 + self.crosses

    @property
    def prompt(self) -> list[int]:
        return [self.handle + 2] * PROMPT_TOKENS[self.crosses]

    @property
    def whole(self) -> list[int]:
        """What it would say if nothing stopped it."""
        return completion(self.prompt, 0, MAX_TOKENS, stops=())

    @property
    def answer(self) -> list[int]:
        """What it says. An abort comes when the token before the border's launch is committed."""
        return self.whole[:4] if self.fate == "finishes" else self.whole

    @property
    def reason(self) -> FinishReason:
        ended = {"finishes": FinishReason.STOP, "is aborted": FinishReason.ABORTED}
        return ended.get(self.fate, FinishReason.LENGTH)

    def submit(self, chain: Chain) -> None:
        stops: tuple[int, ...] = ()
        if self.fate == "finishes":
            stops = (self.whole[3],)
            assert stops[0] not in self.whole[:3]
        chain.submit(self.handle, self.prompt, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=stops)


def request_of(chain: Chain, row: Row) -> Request:
    tracked = chain.engine.registry.by_id(f"r{row.handle}")
    assert tracked is not None
    return tracked.request


def reserved(chain: Chain) -> tuple[int, int, int]:
    """(reserved, adopted, returned)"""
    stats = chain.engine.stats()
    return stats.blocks_reserved, stats.blocks_adopted, stats.blocks_returned


def meet_fate(chain: Chain, row: Row) -> None:
    if row.fate == "is aborted":
        chain.tell(m.Abort(1, (f"r{row.handle}",)))
    if row.fate == "is evicted":  # who is chosen when blocks run out is another test's matter
        chain.engine.scheduler.evict(request_of(chain, row))


def check_answers(chain: Chain, rows: tuple[Row, Row]) -> None:
    for row in rows:
        got = chain.tokens().get(row.handle, [])
        (end,) = chain.finished()[row.handle]
        assert end.reason == row.reason
        if row.fate == "is aborted":
            assert got == row.whole[: len(got)]
        else:
            assert got == row.answer
    chain.check_nothing_is_left()


def pairs(fates: tuple[str, ...]) -> list[tuple[Row, Row]]:
    kinds = list(product((True, False), fates))
    return [(Row(1, *one), Row(2, *other)) for one, other in product(kinds, kinds)]


def name(rows: tuple[Row, Row]) -> str:
    return " + ".join(f"{'crosses' if row.crosses else 'stays'} and {row.fate}" for row in rows)


@pytest.mark.parametrize("rows", pairs(FATES), ids=name)
@pytest.mark.parametrize("depth", [2, 4])
def test_a_block_reserved_for_a_launch_in_flight(depth: int, rows: tuple[Row, Row]) -> None:
    chain = make_chain(depth, schedule=no_step)
    scheduler, pool = chain.engine.scheduler, chain.engine.scheduler.pool
    for row in rows:
        row.submit(chain)
    chain.turn_until(lambda: chain.ledger.launched == BORDER)
    crossing = sum(row.crosses for row in rows)
    assert chain.ledger.committed < BORDER, "the border's launch is in flight"
    assert reserved(chain) == (crossing, 0, 0), "reserved when it was planned"
    assert [len(request_of(chain, row).blocks) for row in rows] == [row.blocks for row in rows]
    assert (pool.owned, pool.fenced) == (sum(row.blocks for row in rows), 0)

    said = {handle: len(tokens) for handle, tokens in chain.tokens().items()}
    held = {row.handle: tuple(request_of(chain, row).blocks) for row in rows}
    for row in rows:
        meet_fate(chain, row)
    chain.engine.intake.take()
    gone = [row for row in rows if row.fate in ("is aborted", "is evicted")]
    kept = [row for row in rows if row not in gone]
    assert pool.owned == sum(row.blocks for row in kept)
    assert pool.fenced == sum(row.blocks for row in gone), "given up, and named by launches in flight"
    assert not {block for row in gone for block in held[row.handle]} & set(pool._free)
    chain.check()

    chain.turn_until(lambda: chain.ledger.committed == BORDER)
    returned = sum(row.crosses for row in rows if row.fate in ("finishes", "is aborted"))
    assert reserved(chain) == (crossing, crossing - returned, returned)
    for row in rows:
        if row.fate == "goes on":
            assert tuple(request_of(chain, row).blocks)[: row.blocks] == held[row.handle], "adopted: it keeps them"
        elif row.fate == "finishes":
            assert not {*held[row.handle]} & {b for r in scheduler.holdings.by_slot if r for b in r.blocks}

    chain.run()
    check_answers(chain, rows)
    assert all(len(chain.tokens()[row.handle]) == said[row.handle] for row in rows if row.fate == "is aborted")
    evicted = sum(row.fate == "is evicted" for row in rows)
    stats = chain.engine.stats()
    assert (stats.events["evicted"].count if evicted else 0) == evicted
    assert stats.blocks_reserved == stats.blocks_adopted + stats.blocks_returned
    assert stats.blocks_returned == returned, "those of later borders were all adopted"


@pytest.mark.parametrize("rows", pairs(("goes on", "finishes")), ids=name)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_reserved_for_the_only_launch_that_may_be_in_flight(depth: int, rows: tuple[Row, Row]) -> None:
    chain = make_chain(depth, schedule=no_step)
    for row in rows:
        row.submit(chain)
    chain.turn_until(lambda: chain.ledger.committed == BORDER)
    crossing = sum(row.crosses for row in rows)
    returned = sum(row.crosses for row in rows if row.fate == "finishes")
    assert reserved(chain) == (crossing, crossing - returned, returned)
    chain.run()
    check_answers(chain, rows)
    assert chain.engine.stats().blocks_returned == returned
