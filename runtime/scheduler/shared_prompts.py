"""Prompts that several completions share (`SharedPrompt`), and the slot of the recurrent state behind one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import lcm

from runahead.runtime.memory.block_pool import BlockPool
from runahead.runtime.memory.prefix_cache import NO_SNAPSHOT, SnapshotPool
from runahead.runtime.memory.slot_pool import SlotPool
from runahead.runtime.scheduler.plan_bounds import SchedulerLimits
from runahead.runtime.scheduler.request import Request, SharedPrompt, share


class SharedPrompts:
    """Shared prompts of an engine. snapshots, state_slots: pools of a model with recurrent states.

    For such a model the first completion computes the shared prompt with its state in a snapshot. Then it gets a state
    slot and continues from the snapshot as the others do. Nothing writes the snapshot after that.

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
        self._ready = list[SharedPrompt]()  # since the last `take_ready`

    def share(self, requests: Sequence[Request]) -> None:
        """Let these completions of one prompt, by index and not yet queued, share its full blocks.

        The block with the prompt's last token is not shared, because its logits are needed. Nothing is shared if the
        model has states and there is no snapshot for one.
        """
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
        """Return whether blocks of the request may be found, by it and by others."""
        prompt = request.shared_prompt
        return self._limits.finds_prefixes or (prompt is not None and prompt.is_open)

    def most_findable(self, request: Request) -> int:
        """Return how many of the row's blocks may be found.

        The last block of a shared prompt may not while the row's state is still in the snapshot. Without a prefix cache
        only the blocks of a shared prompt may.
        """
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
        """Record that the request got a row, which begins with blocks that were found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            self.found(request, len(request.blocks))
            prompt.not_begun.discard(request)
            self._forget(prompt)

    def found(self, request: Request, blocks: int) -> None:
        """Record that the request's first `blocks` blocks can be found."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.found(request, blocks):
            self._ready.append(prompt)

    def take_ready(self) -> list[SharedPrompt]:
        """Return the prompts whose other completions may be admitted from now on, each once."""
        taken, self._ready = self._ready, []
        return taken

    def has_ended(self, request: Request) -> None:
        """Record that the request has ended."""
        prompt = request.shared_prompt
        if prompt is not None and prompt.is_open:
            if prompt.has_ended(request):
                self._ready.append(prompt)
            self._forget(prompt)

    def _forget(self, prompt: SharedPrompt) -> None:
        """Forget the prompt's blocks when each completion has begun or ended and there is no prefix cache."""
        keys = prompt.first.keys
        if not prompt.is_open and not self._limits.finds_prefixes and keys is not None:
            for pool in (self._pool, self._snapshots):
                pool.forget(pool.holding(keys.from_index(0)))

    # ------------------------------------------------------------ the state

    def allocate_state(self, request: Request, found: int) -> int:
        """Return the state slot of a beginning row; while it computes a shared prompt, a snapshot numbered behind the
        slots.

        found: blocks that the row begins with.
        """
        prompt = request.shared_prompt
        if prompt is not None and prompt.first is request and prompt.is_open and found < prompt.blocks:
            if not self._snapshots.ends_at_boundary(prompt.blocks - 1) and self._snapshots.available:
                (request.prompt_state,) = self._snapshots.allocate(1)
                return self._max_rows - 1 + request.prompt_state  # behind the slots, from 1 on
        return self._state_slots.allocate()

    def cut(self, start: int, request: Request) -> int:
        """Return the end of the request's chunk that begins at `start`."""
        end = min(self._limits.cut(start), request.tokens.size)
        boundary = self._boundary(request)
        return min(end, boundary) if start < boundary else end

    def is_at_state(self, request: Request, start: int) -> bool:
        """Return whether the row has computed the shared prompt, up to `start`, with its state in a snapshot."""
        return start == self._boundary(request)

    def leave_state(self, request: Request) -> None:
        """Give the row a state slot. The next launch copies the state there, so the row's record must be sent again."""
        request.begins_as, request.state_slot = request.prompt_state, self._state_slots.allocate()
        # The record clears the row's entries of the block table. Passed boundaries are in the cache by now.
        request.snapshots = array("i", [NO_SNAPSHOT] * len(request.snapshots))

    def _boundary(self, request: Request) -> int:
        """Return the length of the shared prompt, in tokens, while the request's state is in a snapshot; else -1."""
        prompt = request.shared_prompt
        return -1 if prompt is None or request.prompt_state == NO_SNAPSHOT else prompt.blocks * self._pool.block_size
