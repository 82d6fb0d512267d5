"""A `TritonProgram` whose memory tests fill with nonsense, so that a late reader is seen."""

from __future__ import annotations

import torch

from runahead.runtime.programs.cuda.program import TritonProgram


class PoisonedProgram(TritonProgram):
    """Blocks and slots that nobody may read any more can be poisoned."""

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """NaN into KV blocks that nobody may read any more. It does not wait, but copies the list to the device."""
        index = torch.tensor(blocks, dtype=torch.int64, device=self._model.device)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor[index] = float("nan")
        if self._head is not None:
            cache, size = self._head._cache, self._head._block_size
            for tensor in (*cache.entries.keys, *cache.entries.values):
                tensor[index] = float("nan")
            cache.hidden.view(len(cache.hidden) // size, size, cache.hidden.shape[1])[index] = float("nan")

    def poison_row_slot(self, slot: int) -> None:
        """NaN and nonsense into a row slot that nobody may name any more."""
        state, drafts = self.rows.state, self.rows.drafts
        self._logits[slot] = float("nan")
        if drafts is not None and slot < drafts.kept_slots:
            self._logits[state.slots + slot :: drafts.kept_slots] = float("nan")
        if drafts is not None:
            drafts.history[slot] = drafts.proposed[slot] = -(1 << 20)
        state.last_token[slot] = -(1 << 20)
        state.block_table[slot] = 1 << 20
        state.alive[slot] = False

    def poison_penalty_slot(self, slot: int) -> None:
        """Counts as if every token had been generated often, into a penalty slot that nobody may name any more."""
        self.rows.penalties.counts[slot] = 1 << 20
        self.rows.penalties.in_prompt[slot] = -1

    def poison_snapshots(self, snapshots: tuple[int, ...]) -> None:
        """NaN into snapshots that nobody may name any more. They are numbered from 1 on, behind the state slots."""
        for snapshot in snapshots:
            self.poison_state_slot(self.rows.state.slots - 2 + snapshot)

    def poison_state_slot(self, slot: int) -> None:
        """NaN into a state slot that nobody may name any more."""
        for mixer in self._cache.states:
            for tensor in mixer:
                tensor[slot] = float("nan")
        if slot < self.rows.state.slots - 1:  # snapshots keep no inputs
            for run in self._cache.runs:
                run[slot] = float("nan")
