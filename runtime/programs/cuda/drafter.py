"""A drafter with layers over the rows of a GPU's program: `runahead.runtime.programs.cpu.drafter` without host work.

F leaves the drafter's data of its query tokens; apply runs K draft steps, each from the token that the previous step
chose. The shapes of all kernels depend only on the launch's rows and on K.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from runahead.cuda_graphs.device import Form
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.drafting.head_steps import begin_step, make_head_rows
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows
from runahead.runtime.kernels.triton.sampling.sampler import SamplerBuffers, sample_rows_cuda
from runahead.runtime.models.decoder import ReadHidden
from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork

_NOT_DRAFTED: Final = -1e30  # the logit of a token outside a head's vocabulary: finite, never the highest


class GpuDrafter:
    """A draft head or draft model on a GPU.

    rows: their tokens, lengths and blocks are read, with room for drafts. num_blocks: of the pool, including the null
    block. sampler: buffers that are unused between two S.
    """

    def __init__(
        self, network: GpuDraftNetwork, rows: DeviceRows, sampler: SamplerBuffers, *, num_blocks: int, block_size: int,
        context_length: int, vocab_size: int,
    ) -> None:  # fmt: skip
        drafts, state = rows.drafts, rows.state
        assert drafts is not None
        device = state.seq_len.device
        self._network, self._rows, self._drafts, self._sampler = network, rows, drafts, sampler
        self._block_size, self._context_length, self._vocab_size = block_size, context_length, vocab_size
        self._cache = network.make_cache(num_blocks, block_size)
        self._steps = make_head_rows(state.slots, drafts.rows, drafts.block_tables.shape[1], device)
        self._logits = torch.full((drafts.rows, vocab_size), _NOT_DRAFTED, dtype=torch.float32, device=device)
        # The rows for the sampler: each at the position of its next guess.
        self._sampled = replace(state, seq_len=self._steps.next_position, alive=self._steps.active)

    def hidden_reader(self, tokens: int) -> tuple[ReadHidden | None, torch.Tensor | None]:
        """See `TritonHead.hidden_reader`."""
        return self._network.hidden_reader(tokens)

    def follow(self, batch: ForwardBatch, hidden: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Store the hidden states of F's query tokens, [T, hidden]. See `TritonHead.fill`."""
        self._network.fill(batch, hidden, seen, self._cache)

    def propose(self, num_rows: int, count: int) -> None:
        """Propose up to `count` tokens for each of the first `num_rows` rows of the row list, all decoding, as S would
        sample them in the plain form from the network's logits with each position's noise."""
        slots, before, chosen = self._rows.rows.slots, self._steps.before[:num_rows], None
        for ahead in range(count + 1):
            begin_step(
                num_rows, ahead, count, slots, self._rows.state, self._drafts, self._steps, self._block_size,
                self._vocab_size, chosen, None if self._rows.masks is None else self._rows.masks.held,
            )  # fmt: skip
            if ahead == count:
                return
            batch, logits = self._steps.batch(num_rows, self._context_length), self._logits[:num_rows]
            before = self._network.step(batch, before, ahead == 0, self._cache, logits)
            chosen = sample_rows_cuda(
                logits, self._sampled, self._rows.penalties, slots[:num_rows], Form.PLAIN, self._sampler
            ).tokens
