"""A row whose drafts reach over several blocks is given all of them, in their order, and no more."""

from __future__ import annotations

from collections import Counter

import pytest

from runahead.runtime.scheduler.ledger import Launch
from tests.runtime.scheduler.played import Played

DRAFTS = 12  # a launch may need three more blocks of 8 for a row


class TablePlayed(Played):
    """Keeps the block tables that plans have told the device of, and the rows that crossed a border."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table: dict[tuple[int, int], int] = {}
        self.given: list[Counter[int]] = []
        self.reserved = 0
        enqueue = self.ledger.enqueue

        def watched(launch: Launch) -> None:
            self.reserved += launch.crossed_slots.size
            enqueue(launch)

        self.ledger.enqueue = watched  # type: ignore[method-assign]

    def launch(self) -> bool:
        launched = super().launch()
        if launched:
            self._check_tables()
        return launched

    def _check_tables(self) -> None:
        plan, rows, size = self.plans[-1], self.scheduler.rows, self.scheduler.pool.block_size
        self.table |= {(slot, place): block for slot, place, block in plan.appends.tolist()}
        chunks = {chunk.slot for chunk in plan.chunks}
        decoding = [slot for slot in plan.rows.tolist() if slot not in chunks]
        self.given.append(Counter(slot for slot in plan.appends[:, 0].tolist() if slot in decoding))
        for slot in plan.rows.tolist():
            request = self.scheduler.holdings.request(slot)
            assert [self.table[slot, place] for place in range(len(request.blocks))] == [*request.blocks]
            assert rows.num_blocks[slot] == len(request.blocks)
        for slot in decoding:
            longest = min(rows.most_len[slot] + DRAFTS, rows.max_len[slot] - 1)
            assert (rows.num_blocks[slot] - 1) * size < longest, "a block more than it can fill"


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_block_of_a_row_is_in_its_table_and_needed(depth: int) -> None:
    given, mixed = Counter[int](), 0
    for seed in range(4):
        played = TablePlayed(DRAFTS, run_ahead=depth, blocks=100, seed=seed)
        for handle in range(1, 7):
            played.submit(handle, 5 * handle + seed, 60)
        played.run()
        assert {handle: len(said) for handle, said in played.said.items()} == dict.fromkeys(range(1, 7), 60)
        appended = sum(sum(blocks.values()) for blocks in played.given)
        assert played.reserved == played.scheduler.tally.counters["blocks_reserved"] == appended
        for blocks in played.given:
            given.update(blocks.values())
            mixed += len(set(blocks.values())) > 1
    assert given[2] > 0, "no row was given two blocks at once"
    assert mixed > 0, "no launch gave two rows different numbers of blocks"
