"""What completions of one prompt share (`SharedPrompt`), and where the state behind it lies meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import lcm

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.slot_pool import SlotPool
from runahead.runtime.memory.snapshot_pool import NO_SNAPSHOT, SnapshotPool
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request, SharedPrompt, share


class SharedPrompts:
    """Shared prompts of an engine. snapshots, state_slots: of a model with recurrent states.

    Of such a model the first completion computes the shared part of the prompt with its state in a snapshot, and then
    gets a slot and goes on from the snapshot as the others do. Nothing writes the snapshot any more.

    private_salts: how many were given out. Without a prefix cache each shared prompt has one.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        max_rows: int,
        pool: BlockPool,
        snapshots: SnapshotPool,
        state_slots: SlotPool,
    ) -> None:
        self.private_salts = 0
        self._limits = limits
        self._max_rows = max_rows
        self._pool = pool
        self._snapshots = snapshots
        self._state_slots = state_slots
        self._ready = list[SharedPrompt]()  # since `take_ready`

    def share(self, requests: Sequence[Request]) -> None:
        """These are completions of one prompt, by index, that are not queued yet. They share as many of its full blocks
        as leave its last token, whose logits are wanted. Nothing is shared of a state for which there is no place."""
        size, has_state = self._pool.block_size, self._limits.has_state
        unit = lcm(size, self._limits.state_unit) if has_state else size
        blocks = (requests[0].prompt.size - 1) // unit * unit // size
        if len(requests) < 2 or not blocks or (has_state and not self._snapshots.total):
            return
        share(requests, blocks)
        if not self._limits.finds_prefixes:
            self.private_salts += 1
            for request in requests:
                request.salt, request.block_keys = str(self.private_salts), b""

    def may_find(self, request: Request) -> bool:
        """Blocks of the request may be found, by it and by others."""
        prompt = request.shared_prompt
        return self._limits.finds_prefixes or (prompt is not None and prompt.is_open)

    def most_findable(self, request: Request) -> int:
        """Of a row's blocks, how many may be found: not the last one of a shared prompt while the row's state is where
        the others look for it, and without a prefix cache those of a shared prompt alone."""
        prompt = request.shared_prompt
        if not self.may_find(request):
            return 0
        if prompt is None:
            return len(request.blocks)
        if request.state_slot >= self._max_rows:
            return prompt.blocks - 1
        if self._limits.finds_prefixes:
            return len(request.blocks)
        return prompt.blocks if prompt.first is request else 0

    # ------------------------------------------------------------ completions come and go

    def has_begun(self, request: Request) -> None:
        """The request has got a row, which begins with blocks that were found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            self.found(request, len(request.blocks))
            prompt.not_begun.discard(request)
            self._forget(prompt)

    def found(self, request: Request, blocks: int) -> None:
        """So many blocks of the request, its first ones, can be found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.found(request, blocks):
            self._ready.append(prompt)

    def take_ready(self) -> list[SharedPrompt]:
        """Prompts whose other completions may be admitted from now on. Each is returned once."""
        taken, self._ready = self._ready, []
        return taken

    def has_ended(self, request: Request) -> None:
        """The request has ended."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            if prompt.has_ended(request):
                self._ready.append(prompt)
            self._forget(prompt)

    def _forget(self, prompt: SharedPrompt) -> None:
        """Once each completion has begun, or ended: without a prefix cache nothing of the prompt is found any more."""
        keys = prompt.first.keys
        if not prompt.is_open and not self._limits.finds_prefixes and keys is not None:
            for pool in (self._pool, self._snapshots):
                pool.forget(pool.holding(keys.from_place(0)))

    # ------------------------------------------------------------ the state

    def state_place(self, request: Request, found: int) -> int:
        """Where the state of a row that begins is: in a slot, or, while it computes a shared prompt, in a snapshot.

        found: blocks that the row begins with.
        """
        prompt = request.shared_prompt
        if prompt is not None and prompt.first is request and prompt.is_open and found < prompt.blocks:
            if not self._snapshots.ends_at_border(prompt.blocks - 1) and self._snapshots.available:
                (request.prompt_state,) = self._snapshots.allocate(1)
                return self._max_rows - 1 + request.prompt_state  # behind the slots, from 1 on
        return self._state_slots.allocate()

    def cut(self, start: int, request: Request) -> int:
        """Where a chunk of the request from `start` on ends."""
        end = min(self._limits.cut(start), request.tokens.size)
        border = self._border(request)
        return min(end, border) if start < border else end

    def is_at_state(self, request: Request, start: int) -> bool:
        """The row has computed the shared part of its prompt, up to `start`, and its state is in a snapshot."""
        return start == self._border(request)

    def leave_state(self, request: Request) -> None:
        """The next launch copies the state to a slot of the row. The row's record has to be sent again."""
        request.begins_as, request.state_slot = request.prompt_state, self._state_slots.allocate()
        # The record clears the row's part of the block table. Borders that the row has passed are in the cache by now.
        request.snapshots = array("i", [NO_SNAPSHOT] * len(request.snapshots))

    def _border(self, request: Request) -> int:
        """Tokens of the shared part of a prompt, while the request's state is in a snapshot; else -1."""
        prompt = request.shared_prompt
        return -1 if prompt is None or request.prompt_state == NO_SNAPSHOT else prompt.blocks * self._pool.block_size
