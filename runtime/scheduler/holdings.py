"""Slots and blocks of rows: how rows get them, and how the fence returns them."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runahead.runtime.memory.block_pool import NO_SLOT, BlockPool, SlotPool
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT, Hit, PrefixWalk, SnapshotPool
from runahead.runtime.rounding import ceil_div
from runahead.runtime.scheduler.callers import Callers
from runahead.runtime.scheduler.ledger import Ledger
from runahead.runtime.scheduler.outcomes import Deferred, Eviction, Filled, Release
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request, SharedPrompts
from runahead.runtime.scheduler.rows import RowPhase, Rows
from runahead.runtime.scheduler.steady_decode import TokenTimes
from runahead.runtime.wire.prompts import PrefixKeys

_A_FEW: Final = 48  # blocks that join the prefix cache in a turn, at least


class Holdings:
    """Pools of everything that a row can have, and the request of each row slot.

    paused: slots of rows that the last plan left out for lack of blocks.
    """

    def __init__(self, limits: SchedulerLimits, rows: Rows, pool: BlockPool, ledger: Ledger[Deferred]) -> None:
        self.rows = rows
        self.pool = pool
        self.penalty_slots = SlotPool(limits.penalty_slots, "penalty slot")
        self.state_slots = SlotPool(rows.max_rows if limits.has_state else 0, "state slot")
        self.snapshots = SnapshotPool(limits.snapshots, limits.snapshot_tokens // pool.block_size, pool.block_size)
        self.by_slot: list[Request | None] = [None] * rows.max_rows
        self.token_times = TokenTimes(rows.max_rows)
        self.callers = Callers(rows, self.by_slot)
        self.paused: frozenset[int] = frozenset()
        self.shared = SharedPrompts(limits, rows.max_rows, pool, self.snapshots, self.state_slots)
        self._limits = limits
        self._ledger = ledger
        self._first_snapshot = ceil_div(limits.context_length, pool.block_size)  # index in a block table
        # Tokens of a row in its last F, or that its state covers: a block is found only with the state behind it.
        self._written = rows.state_len if limits.has_state else rows.least_len
        self._filled: Filled = {}  # released by the fence, not in the prefix cache yet; oldest first

    def request(self, slot: int) -> Request:
        """Return the request that has the row slot."""
        request = self.by_slot[slot]
        assert request is not None
        return request

    def requests(self) -> list[Request]:
        """Return all requests with a row."""
        return [request for request in self.by_slot if request is not None]

    def phase_of(self, request: Request) -> str:
        """Return WAITING, PAUSED, or the phase of the request's row."""
        if request.row_slot == NO_SLOT:
            return "WAITING"
        if request.row_slot in self.paused:
            return "PAUSED"
        return RowPhase(int(self.rows.phase[request.row_slot])).name

    def blocks_at_most(self, request: Request) -> int:
        """Return the blocks of a request at its greatest length. Its last token is never forwarded."""
        return self.pool.blocks_for(request.max_len - 1)

    # ------------------------------------------------------------ allocated

    def allocate_row(self, request: Request, hit: Hit) -> None:
        """Give the request a row slot, the slots that go with it, and its cached prefix. Only the next launch names the
        snapshot that its state begins as."""
        request.row_slot = self.rows.allocate()
        self.by_slot[request.row_slot] = request
        self.token_times.begin(request.row_slot, request.last_token_s)
        if request.sampling.has_penalty:
            request.penalty_slot = self.penalty_slots.allocate()
        if hit.blocks:
            self.pool.share(hit.blocks)
        request.blocks = hit.blocks[:]
        request.shared = request.registered = len(hit.blocks)
        request.begun_at = max(request.begun_at, len(hit.blocks) * self.pool.block_size, request.computed)
        request.begins_as = hit.snapshot
        if hit.snapshot != NO_SNAPSHOT:
            self._begin_with(hit.snapshot)
            if self.snapshots.every:
                request.snapshots.extend([NO_SNAPSHOT] * (len(hit.blocks) // self.snapshots.every))
        if self._limits.has_state:
            request.state_slot = self.shared.allocate_state(request, len(hit.blocks))
        self.shared.has_begun(request)

    def _begin_with(self, snapshot: int) -> None:
        """Let only the next launch read this snapshot for a row that begins."""
        self.snapshots.begin_with(snapshot)
        self._ledger.defer(self._ledger.launched + 1, Release(snapshots=(snapshot,)))

    def allocate_blocks(self, request: Request, count: int) -> list[int]:
        """Allocate `count` more blocks for a row."""
        blocks = self.pool.allocate(count)
        request.blocks.extend(blocks)
        self.rows.set_num_blocks(request.row_slot, len(request.blocks))
        return blocks

    def reserve_blocks(self, slots: NDArray[np.int64]) -> list[int]:
        """Reserve for each of these rows the block behind a block boundary. [n]"""
        blocks = self.pool.allocate(slots.size)
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            request = self.by_slot[slot]
            assert request is not None
            request.blocks.append(block)
        self.rows.add_block(slots)
        return blocks

    def reserve_snapshots(self, slots: Sequence[int], room: int) -> list[tuple[int, int, int]]:
        """Reserve snapshots for the states of these rows at boundaries that their newest blocks end at, `room` at most.

        Returns (slot, index in the row's block table, snapshot) of each. No row waits for a snapshot: without an
        available one the row continues, and the boundary is counted as skipped. A boundary that the row will not reach
        has none.
        """
        pool, found = self.snapshots, list[tuple[int, int, int]]()
        if not pool.every:
            return found
        for slot in slots:
            request = self.request(slot)
            for boundary in range(len(request.snapshots), len(request.blocks) // pool.every):
                is_reached = (boundary + 1) * self._limits.snapshot_tokens < request.max_len
                taken = NO_SNAPSHOT
                if is_reached and pool.available and len(found) < room:
                    (taken,) = pool.allocate(1)
                    found.append((slot, self._first_snapshot + boundary, taken))
                pool.skipped_total += is_reached and taken == NO_SNAPSHOT
                request.snapshots.append(taken)
        return found

    # ------------------------------------------------------------ found again

    def walk(self, request: Request) -> PrefixWalk:
        """Return a lookup of the cached blocks that a request's tokens begin with. It finds none while
        log-probabilities of the prompt are owed, since these need the whole prompt computed."""
        finds = self.searches_prefix(request)
        snapshots = self.snapshots if self._limits.has_state else None
        return PrefixWalk(self.pool, self._keys(request), request.tokens if finds else request.tokens[:1], snapshots)

    def searches_prefix(self, request: Request) -> bool:
        """Return whether the prefix cache is searched for the request's tokens."""
        return self.shared.may_find(request) and not request.wants_prompt_logprobs

    def register(self, slots: list[int], numbers: list[int]) -> None:
        """Let blocks that these rows fill be found when the row's launch in `numbers` has retired. [n]

        numbers: the newest launch that has the row. [n]
        """
        if not self._limits.finds_prefixes and not self.shared.private_salts:
            return
        filled: dict[int, Filled] = defaultdict(dict)
        full = (self._written[slots] // self.pool.block_size).tolist()
        for slot, number, end in zip(slots, numbers, full, strict=True):
            request = self.by_slot[slot]
            assert request is not None
            registered, blocks = request.registered, request.blocks
            # A row that must end in an enqueued launch counts tokens of later ones, for which it got no block.
            if registered == end or registered == len(blocks):
                continue
            end = min(end, len(blocks), self.shared.most_findable(request))
            if registered >= end:
                continue
            behind = filled[number]
            for index in range(registered, end):
                behind[blocks[index]] = request, slot, index, self._give_up_snapshot(request, index)
                request.registered = index + 1
        for number, behind in filled.items():
            self._ledger.defer(number, behind)

    def _give_up_snapshot(self, request: Request, index: int) -> int:
        """Fence and return the snapshot of the row's state behind block `index` of the row, or return NO_SNAPSHOT."""
        prompt = request.shared_prompt
        if request.prompt_state != NO_SNAPSHOT and prompt is not None and index == prompt.blocks - 1:
            snapshot, request.prompt_state = request.prompt_state, NO_SNAPSHOT
        elif self.snapshots.ends_at_boundary(index):
            snapshot = request.snapshots[index // self.snapshots.every]
        else:
            return NO_SNAPSHOT
        if snapshot != NO_SNAPSHOT:
            self.snapshots.fence([snapshot])
        return snapshot

    def forget_written(self, request: Request) -> None:
        """Record that a row was not finite: nothing that it wrote can be found any more, even blocks that it has given
        up."""
        self.rows.not_finite(request.row_slot)
        for pool in (self.pool, self.snapshots):
            pool.forget(pool.holding(self._keys(request).from_index(request.shared)))

    def make_some_findable(self) -> Release:
        """Add blocks that the fence let go to the prefix cache: the oldest eighth of them, or a few, in each turn.

        Rows that arrived together fill their blocks together, and a block's key takes long to compute. Returns freed
        snapshots that can't be found.
        """
        if not self._filled:
            return Release()
        freed = self._make_findable(list(islice(self._filled, max(_A_FEW, len(self._filled) // 8))))
        return Release(snapshots=freed)

    def _make_findable(self, blocks: list[int]) -> list[int]:
        """Add these blocks and the snapshots behind them to the prefix cache, except blocks with an uncommitted token
        or of a row that was not finite. Returns the snapshots that are free now."""
        requests, in_slots, indexes, taken = zip(*(self._filled.pop(block) for block in blocks), strict=True)
        rows, size, slots = self.rows, self.pool.block_size, np.array(in_slots)
        starts = np.array(indexes) * size
        waits = 0 if self._limits.has_state else rows.waits[slots]  # a held row's state does not change
        full = np.minimum(rows.committed_len[slots], self._written[slots] + waits) >= starts + size
        good = (full & rows.finite[slots]).tolist()
        tokens = rows.history[slots[:, None], starts[:, None] + np.arange(size)].tobytes()
        end, freed = 0, list[int]()
        for is_good, block, request, index, snapshot in zip(good, blocks, requests, indexes, taken, strict=True):
            begin, end = end, end + 4 * size
            if request.shared_prompt is not None:
                self.shared.found(request, index + 1)
                is_good &= self.shared.may_find(request)
            if is_good:
                content = (request.keys or self._keys(request)).content(index, tokens[begin:end])
                self.pool.make_findable(block, content)
                if snapshot != NO_SNAPSHOT:
                    self.snapshots.make_findable(snapshot, content)
            if snapshot != NO_SNAPSHOT:
                freed += self.snapshots.release([snapshot])
        return freed

    def _keys(self, request: Request) -> PrefixKeys:
        if request.keys is None:
            request.keys = PrefixKeys(request.salt, request.block_keys)
        return request.keys

    # ------------------------------------------------------------ given up

    def end_row(self, request: Request) -> None:
        """Void the row's launches in flight, and put everything that it has behind the fence."""
        slot, rows = request.row_slot, self.rows
        self._give_up_blocks(request)
        self._ledger.defer(int(rows.last_naming[slot]), Release(row_slot=slot, penalty_slot=request.penalty_slot))
        self._leave(request)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Record that the request has ended."""
        self.callers.leave(request.caller)
        self.shared.has_ended(request)

    def evict(self, request: Request) -> None:
        """Leave the row out of later plans. Its tokens in flight still count; then its request waits again."""
        slot, rows = request.row_slot, self.rows
        rows.enter(slot, RowPhase.LEAVING)
        self.paused -= {slot}
        self._give_up_blocks(request)
        self._ledger.defer(int(rows.last_naming[slot]), Eviction(request, slot, int(rows.epoch[slot])))

    def _give_up_blocks(self, request: Request) -> None:
        """Put blocks, state slot and snapshots behind the fence until the last F that names them has retired."""
        last = int(self.rows.last_launch[request.row_slot])
        if request.blocks:
            self.register([request.row_slot], [last])
            self.pool.fence(request.blocks)
        ahead = self._snapshots_ahead(request)
        if request.state_slot >= self.rows.max_rows:  # the row's state is in a snapshot, not in a slot
            request.state_slot = NO_SLOT
        if request.state_slot != NO_SLOT:
            self.state_slots.fence(request.state_slot)
        self.snapshots.fence(ahead)
        if request.blocks or request.state_slot != NO_SLOT or ahead:
            self._ledger.defer(last, Release(blocks=request.blocks, state_slot=request.state_slot, snapshots=ahead))
        request.blocks, request.snapshots, request.begins_as = array("i"), array("i"), NO_SNAPSHOT
        request.state_slot, request.prompt_state = NO_SLOT, NO_SNAPSHOT
        request.registered = request.shared = 0

    def _snapshots_ahead(self, request: Request) -> list[int]:
        """Return the snapshots that only the row has: for boundaries that it has not reached, and the one with its
        state."""
        ahead = [] if request.prompt_state == NO_SNAPSHOT else [request.prompt_state]
        if request.snapshots:
            reached = request.registered // self.snapshots.every
            ahead += [one for one in request.snapshots[reached:] if one != NO_SNAPSHOT]
        return ahead

    def _leave(self, request: Request) -> None:
        """Fence the row slot and the penalty slot, and take them from the request."""
        slot = request.row_slot
        request.drafted += self.rows.drafted[slot]
        request.accepted += self.rows.accepted[slot]
        request.generated = int(self.rows.committed_len[slot]) - request.prompt.size
        self.callers.row_ended(request)
        self.rows.fence(slot)
        if request.penalty_slot != NO_SLOT:
            self.penalty_slots.fence(request.penalty_slot)
        self.paused -= {slot}
        self.by_slot[slot] = None
        request.row_slot = request.penalty_slot = NO_SLOT

    # ------------------------------------------------------------ given back by the fence

    def release(self, resource: Release | Filled) -> Release:
        """Release what no launch in flight names any more. Returns what no other request has."""
        if isinstance(resource, dict):
            self._filled.update(resource)
            return Release()
        late = self._filled and [block for block in self.pool.unfindable(resource.blocks) if block in self._filled]
        snapshots = self._make_findable(late) if late else []
        if resource.snapshots:
            snapshots += self.snapshots.release(resource.snapshots)
        if resource.row_slot != NO_SLOT:
            self.rows.release(resource.row_slot)
        if resource.penalty_slot != NO_SLOT:
            self.penalty_slots.release(resource.penalty_slot)
        if resource.state_slot != NO_SLOT:
            self.state_slots.release(resource.state_slot)
        freed = self.pool.release(resource.blocks) if resource.blocks else []
        return Release(resource.row_slot, tuple(freed), resource.penalty_slot, resource.state_slot, snapshots)

    def evicted(self, eviction: Eviction) -> Release:
        """Free the slots of a leaving row whose tokens are all committed, since nothing names them.

        Returns them, or nothing if the request has ended since and gave them up then.
        """
        request, slot, rows = eviction.request, eviction.row_slot, self.rows
        if rows.epoch[slot] != eviction.epoch:
            return Release()
        request.tokens = rows.history[slot, : rows.committed_len[slot]].copy()
        request.computed = int(rows.least_len[slot]) + bool(rows.waits[slot])
        request.last_token_s = self.token_times.last_s(slot)
        request.evictions += not request.gives_way
        request.gives_way = False
        gone = Release(row_slot=slot, penalty_slot=request.penalty_slot)
        self._leave(request)
        return self.release(gone)

    def not_finite(self, slots: NDArray[np.int32]) -> None:
        """Record rows that a retired launch left a NaN or an infinity: nothing they write can be found any more."""
        self.rows.not_finite(slots)
