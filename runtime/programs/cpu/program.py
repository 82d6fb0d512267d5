"""S, apply and F of a model on the CPU, with the reference kernels. `TritonProgram` is the same on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import LaunchShape
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.drafters.ngram import Drafter
from runahead.runtime.kernels.row_state import PenaltyState, RowState
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.drafters.draft_model import DraftNetwork
from runahead.runtime.programs.cpu.drafter import HeadDrafter
from runahead.runtime.programs.cpu.inputs import batch_of, slot_of_snapshot, state_slots_of
from runahead.runtime.programs.cpu.rows import HostRows
from runahead.runtime.programs.cpu.sampler import HostSampler, leave_prompt_logprobs, part_of
from runahead.runtime.rounding import ceil_div
from runahead.runtime.row_record import ROW_TENSORS
from runahead.runtime.wire.parameters import MAX_BIAS, MAX_STOP_IDS


class HostProgram:
    """A `runahead.cuda_graphs.device.Program` over a `Decoder` in ordinary memory.

    num_blocks includes the null block. Logits stay by row slot, float32 [max_rows + 1, 1 + K, vocab], from an F to the
    next S, with K drafts as in the rings' cells; several ranks keep a part each. snapshots: of recurrent states, at
    every snapshot_tokens-th token of a row. launched: the number before the first launch's. drafter: for launches with
    drafts; head: a drafter with weights, in its place. masks: of rows with a grammar. sampled_vocab: only ids below
    this may be sampled; None: all.
    """

    def __init__(
        self,
        model: Decoder,
        rings: RingMemory,
        *,
        max_rows: int,
        num_blocks: int,
        block_size: int,
        context_length: int,
        penalty_slots: int = 0,
        snapshots: int = 0,
        snapshot_tokens: int = 0,
        launched: int = 0,
        drafter: Drafter | None = None,
        head: DraftNetwork | None = None,
        masks: MaskMemory | None = None,
        sampled_vocab: int | None = None,
    ) -> None:
        self._model = model
        self._rings = rings
        vocab = model.config.vocab_size
        self.rows = HostRows(
            rings, max_rows, ceil_div(context_length, block_size), vocab, block_size, MAX_STOP_IDS, MAX_BIAS,
            penalty_slots=penalty_slots, launched=launched, drafter=drafter, masks=masks,
            snapshot_tokens=snapshot_tokens if snapshots else 0,
        )  # fmt: skip
        state = RowState(**{name: torch.from_numpy(getattr(self.rows, name)) for name in ROW_TENSORS})
        penalties = PenaltyState(torch.from_numpy(self.rows.counts), torch.from_numpy(self.rows.in_prompt))
        self._cache = model.make_cache(num_blocks, block_size, max_rows, snapshots, rings.layout.drafts)
        self._logits = np.zeros((max_rows + 1, 1 + rings.layout.drafts, model.logit_width), np.float32)
        part = part_of(model.ranks, self._logits, vocab, sampled_vocab)
        self._left = self._logits if part is None else part.logits
        self._sampler = HostSampler(self.rows, self._logits[..., :sampled_vocab], state, penalties, model.ranks, part)
        self._head: HeadDrafter | None = None
        if head is not None:
            self._head = HeadDrafter(head, self.rows, num_blocks, self._sampler.guessed)
            self.rows.drafter = self._head

    @torch.inference_mode()
    def sample(self, shape: LaunchShape) -> None:
        self.rows.begin()
        if not shape.sample_rows:
            return
        indexes, slots = self.rows.to_sample()
        self._sampler.sample(indexes, slots, shape.form, shape.sample_drafts)

    def apply(self, shape: LaunchShape) -> int:
        return self.rows.apply()

    @torch.inference_mode()
    def forward(self, shape: LaunchShape) -> None:
        if self.rows.rows.size == 0:
            return
        self._sampler.draft()
        queries = self.rows.queries()
        states = state_slots_of(self.rows, queries) if self._cache.states else None
        batch = batch_of(self.rows, queries, states)
        seen: dict[int, torch.Tensor] = {}  # hidden states of layers that a head reads
        read_hidden = None if self._head is None else self._head.hidden_reader(seen)
        hidden = self._model.forward(batch, self._cache, read_hidden=read_hidden)
        if queries.sample_slots.size:
            logits = self._model.own_logits(torch.from_numpy(hidden.numpy()[queries.sample_queries]))
            self._left[queries.sample_slots, queries.sample_offsets] = logits.numpy()
        finite = np.isfinite(hidden.numpy()).all(axis=1)
        if shape.prompt_logprobs:
            leave_prompt_logprobs(self._model, self.rows, hidden, queries, finite, self._sampler.vocab)
        self.rows.write_finite(finite, queries)
        if states is not None:
            self.rows.leave_states(queries.slots, states.lengths)
        if self._head is not None:
            self._head.follow(queries, batch, hidden, seen)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self.rows.read()

    # ------------------------------------------------------------ the test mode

    def poison_blocks(self, blocks: tuple[int, ...]) -> None:
        """Write NaN into released KV blocks."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor[index] = float("nan")
        if self._head is not None:
            self._head.poison_blocks(blocks)

    def poison_row_slot(self, slot: int) -> None:
        """Write NaN and nonsense into a released row slot."""
        self._logits[slot] = self._left[slot] = np.nan
        if self.rows.drafter is not None:
            self.rows.drafter.poison(slot)
        self.rows.last_token[slot] = -(1 << 20)
        self.rows.block_table[slot] = 1 << 20
        self.rows.alive[slot] = False

    def poison_penalty_slot(self, slot: int) -> None:
        """Write high counts of every token into a released penalty slot."""
        self.rows.poison_penalty_slot(slot)

    def poison_state_slot(self, slot: int) -> None:
        """Write NaN into a released state slot."""
        for mixer in self._cache.states:
            for tensor in mixer:
                tensor[slot] = float("nan")
        if slot < self.rows.seq_len.size - 1:
            for run in self._cache.runs:
                run[slot] = float("nan")

    def poison_snapshots(self, snapshots: tuple[int, ...]) -> None:
        """Write NaN into released snapshots."""
        for snapshot in snapshots:
            self.poison_state_slot(slot_of_snapshot(self.rows, snapshot))
