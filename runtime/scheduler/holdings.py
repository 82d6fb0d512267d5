"""What rows hold (slots, blocks), how it is allocated to them, and how it comes back through the fence."""

from __future__ import annotations

from array import array
from collections import defaultdict
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import PrefixWalk
from runahead.runtime.memory.slot_pool import NO_SLOT, SlotPool
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Eviction, Filled, Release
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.wire.block_keys import PrefixKeys

_A_FEW: Final = 48  # blocks that join the prefix cache in a turn


class Holdings:
    """Pools of everything that a row can hold, and whose row each slot is.

    paused: slots of rows left out of the last plan for want of blocks.
    """

    def __init__(self, limits: SchedulerLimits, rows: Rows, pool: BlockPool, ledger: Ledger[Deferred]) -> None:
        self.rows = rows
        self.pool = pool
        self.penalty_slots = SlotPool(limits.penalty_slots, "penalty slot")
        self.state_slots = SlotPool(rows.max_rows if limits.has_state else 0, "state slot")
        self.by_slot: list[Request | None] = [None] * rows.max_rows
        self.paused: frozenset[int] = frozenset()
        self._limits = limits
        self._ledger = ledger
        self._filled: Filled = {}  # let go by the fence, not in the prefix cache yet; oldest first

    def request(self, slot: int) -> Request:
        """Whose row it is."""
        request = self.by_slot[slot]
        assert request is not None
        return request

    def requests(self) -> list[Request]:
        """All that have a row."""
        return [request for request in self.by_slot if request is not None]

    def blocks_at_most(self, request: Request) -> int:
        """Blocks of a request at its longest: its last token is never forwarded."""
        return self.pool.blocks_for(request.max_len - 1)

    # ------------------------------------------------------------ allocated

    def allocate_row(self, request: Request, prefix: array[int]) -> None:
        """A row slot, what goes with it, and the cached blocks that its tokens begin with."""
        request.row_slot = self.rows.allocate()
        self.by_slot[request.row_slot] = request
        if request.sampling.has_penalty:
            request.penalty_slot = self.penalty_slots.allocate()
        if self._limits.has_state:
            request.state_slot = self.state_slots.allocate()
        if prefix:
            self.pool.share(prefix)
        request.blocks = prefix[:]
        request.shared = request.registered = len(prefix)

    def allocate_blocks(self, request: Request, count: int) -> list[int]:
        """More blocks for a row."""
        blocks = self.pool.allocate(count)
        request.blocks.extend(blocks)
        self.rows.hold_blocks(request.row_slot, len(request.blocks))
        return blocks

    def reserve_blocks(self, slots: NDArray[np.int64]) -> list[int]:
        """The block behind a border for each of these rows. [n]"""
        blocks = self.pool.allocate(slots.size)
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            request = self.by_slot[slot]
            assert request is not None
            request.blocks.append(block)
        self.rows.hold_one_more_block(slots)
        return blocks

    # ------------------------------------------------------------ found again

    def walk(self, request: Request) -> PrefixWalk:
        """A search for the cached blocks that a request's tokens begin with. It finds none while log-probabilities of
        the prompt are owed: the whole prompt has to be computed for these."""
        finds = self.looks_for_prefix(request)
        return PrefixWalk(self.pool, self._keys(request), request.tokens if finds else request.tokens[:1])

    def looks_for_prefix(self, request: Request) -> bool:
        """The prefix cache is asked for what the request's tokens begin with."""
        return self._limits.finds_prefixes and not request.wants_prompt_logprobs

    def register(self, slots: list[int], numbers: list[int]) -> None:
        """Blocks that these rows fill may be found, once the launch has retired that is named for the row. [n]

        numbers: for each row, of the newest launch that holds it. [n]
        """
        if not self._limits.finds_prefixes:
            return
        filled: dict[int, Filled] = defaultdict(dict)
        full = (self.rows.least_len[slots] // self.pool.block_size).tolist()
        for slot, number, end in zip(slots, numbers, full, strict=True):
            request = self.by_slot[slot]
            assert request is not None
            registered, blocks = request.registered, request.blocks
            # A row that must end in a launch already enqueued counts tokens of later ones, for which it got no block.
            if registered == end or registered == len(blocks):
                continue
            behind = filled[number]
            for place in range(registered, min(end, len(blocks))):
                behind[blocks[place]] = request, slot, place
                request.registered = place + 1
        for number, behind in filled.items():
            self._ledger.defer(number, behind)

    def forget_written(self, request: Request) -> None:
        """A row was not finite: nothing that it has written is found from now on, even if it has given it up."""
        self.rows.not_finite(request.row_slot)
        self.pool.forget(self.pool.holding(self._keys(request).from_place(request.shared)))

    def make_some_findable(self) -> None:
        """Blocks that the fence has let go join the prefix cache: an eighth of them in a turn, the oldest, or a few.

        Rows that came together fill their blocks together, and a block's key takes long to make.
        """
        if self._filled:
            self._make_findable(list(islice(self._filled, max(_A_FEW, len(self._filled) // 8))))

    def _make_findable(self, blocks: list[int]) -> None:
        """These join the prefix cache, but for blocks with a token that is not committed or of a row that was not
        finite."""
        requests, in_slots, places = zip(*(self._filled.pop(block) for block in blocks), strict=True)
        rows, size, slots = self.rows, self.pool.block_size, np.array(in_slots)
        starts = np.array(places) * size
        full = np.minimum(rows.committed_len[slots], rows.least_len[slots] + rows.waits[slots]) >= starts + size
        good = (full & rows.finite[slots]).tolist()
        tokens = rows.history[slots[:, None], starts[:, None] + np.arange(size)].tobytes()
        end = 0
        for is_good, block, request, place in zip(good, blocks, requests, places, strict=True):
            begin, end = end, end + 4 * size
            if is_good:
                self.pool.make_findable(block, (request.keys or self._keys(request)).content(place, tokens[begin:end]))

    def _keys(self, request: Request) -> PrefixKeys:
        if request.keys is None:
            request.keys = PrefixKeys(request.salt, request.block_keys)
        return request.keys

    # ------------------------------------------------------------ given up

    def end_row(self, request: Request) -> None:
        """Void what is in flight, and put what the row holds behind the fence."""
        slot, rows = request.row_slot, self.rows
        self._give_up_blocks(request)
        self._ledger.defer(int(rows.last_naming[slot]), Release(row_slot=slot, penalty_slot=request.penalty_slot))
        self._leave(request)

    def evict(self, request: Request) -> None:
        """The row is in no further plan. Its tokens in flight still count; then its request waits again."""
        slot, rows = request.row_slot, self.rows
        rows.enter(slot, RowPhase.LEAVING)
        self.paused -= {slot}
        self._give_up_blocks(request)
        self._ledger.defer(int(rows.last_naming[slot]), Eviction(request, slot, int(rows.epoch[slot])))

    def _give_up_blocks(self, request: Request) -> None:
        """Blocks and state slot go behind the fence, until the last F that names them has retired."""
        last = int(self.rows.last_launch[request.row_slot])
        if request.blocks:
            self.register([request.row_slot], [last])
            self.pool.fence(request.blocks)
        if request.state_slot != NO_SLOT:
            self.state_slots.fence(request.state_slot)
        if request.blocks or request.state_slot != NO_SLOT:
            self._ledger.defer(last, Release(blocks=request.blocks, state_slot=request.state_slot))
        request.blocks = array("i")
        request.state_slot = NO_SLOT
        request.registered = request.shared = 0

    def _leave(self, request: Request) -> None:
        """The row slot and the penalty slot are fenced, and no request has them any more."""
        slot = request.row_slot
        request.drafted += int(self.rows.drafted[slot])
        request.accepted += int(self.rows.accepted[slot])
        self.rows.fence(slot)
        if request.penalty_slot != NO_SLOT:
            self.penalty_slots.fence(request.penalty_slot)
        self.paused -= {slot}
        self.by_slot[slot] = None
        request.row_slot = request.penalty_slot = NO_SLOT

    # ------------------------------------------------------------ given back by the fence

    def release(self, resource: Release | Filled) -> Release:
        """No launch in flight names it any more. Returns what of it nobody else holds."""
        if isinstance(resource, dict):
            self._filled.update(resource)
            return Release()
        late = self._filled and [block for block in self.pool.unfindable(resource.blocks) if block in self._filled]
        if late:
            self._make_findable(late)
        if resource.row_slot != NO_SLOT:
            self.rows.release(resource.row_slot)
        if resource.penalty_slot != NO_SLOT:
            self.penalty_slots.release(resource.penalty_slot)
        if resource.state_slot != NO_SLOT:
            self.state_slots.release(resource.state_slot)
        freed = self.pool.release(resource.blocks) if resource.blocks else []
        return Release(resource.row_slot, tuple(freed), resource.penalty_slot, resource.state_slot)

    def evicted(self, eviction: Eviction) -> Release:
        """Every token of the leaving row is committed and nothing names its slots: they are free at once.

        Returns them; nothing, if the request has ended since, and gave them up then.
        """
        request, slot, rows = eviction.request, eviction.row_slot, self.rows
        if rows.epoch[slot] != eviction.epoch:
            return Release()
        request.tokens = rows.history[slot, : rows.committed_len[slot]].copy()
        request.computed = int(rows.least_len[slot])
        request.last_token_s = rows.token_times.last_s(slot)
        request.evictions += 1
        gone = Release(row_slot=slot, penalty_slot=request.penalty_slot)
        self._leave(request)
        return self.release(gone)

    def not_finite(self, slots: NDArray[np.int32]) -> None:
        """A launch that has retired left these rows a NaN or an infinity: nothing they write is found from now on."""
        self.rows.not_finite(slots)
