"""A whole model that drafts for another on a GPU: `runahead.runtime.models.drafters.draft_model` with Triton kernels.

It runs as a draft head that reads no hidden state, so that module's rules on blocks and entries apply.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.models.decoder import Decoder, ReadHidden
from runahead.runtime.models.drafters.draft_model import DraftModelFiles, DraftModelSizes
from runahead.runtime.models.drafters.head_files import HeadFiles
from runahead.runtime.models.load import load_model
from runahead.runtime.programs.cuda.draft_head import GpuDraftCache, TritonHead


class TritonDraftModel(DraftModelSizes):
    """A draft model and its target on a GPU, with the methods of `TritonHead`."""

    def make_cache(self, num_blocks: int, block_size: int) -> GpuDraftCache:
        nothing = torch.zeros((num_blocks * block_size, 0), dtype=self._model.dtype, device=self._model.device)
        return GpuDraftCache(self._model.make_cache(num_blocks, block_size), nothing)

    def hidden_reader(self, tokens: int) -> tuple[ReadHidden | None, torch.Tensor | None]:
        return None, None

    def fill(self, batch: ForwardBatch, hidden: torch.Tensor, seen: torch.Tensor | None, cache: GpuDraftCache) -> None:
        self._model.forward(batch, cache.entries)

    def step(
        self, batch: ForwardBatch, before: torch.Tensor, is_first: bool, cache: GpuDraftCache, logits: torch.Tensor
    ) -> torch.Tensor:
        hidden, indexes = self._model.forward(batch, cache.entries), batch.query_start_loc[: batch.num_rows]
        own = self._model.weights
        self._model.kernels.logits_into(hidden, own.lm_head, logits, indexes, own.logit_cap)
        return before


GpuDraftNetwork: TypeAlias = TritonHead | TritonDraftModel


def load_drafter(
    files: HeadFiles | DraftModelFiles, target: Decoder, positions: int, *, drawn: bool
) -> GpuDraftNetwork:
    """Load a draft head or draft model on its target's GPU, in the target's dtype.

    positions: the longest context. drawn: random weights, without reading a
    file. Raises CheckpointError.
    """
    if isinstance(files, HeadFiles):
        weights = files.weights(torch.Tensor.contiguous, target.device, target.dtype, drawn=drawn)
        return TritonHead(weights, target, positions)
    model = load_model(
        files.checkpoint, target.device, target.dtype, "dummy" if drawn else "auto", TritonKernelSet(), None,
        positions, files.config,
    )  # fmt: skip
    return TritonDraftModel(model, target)
