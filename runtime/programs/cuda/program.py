"""S, apply and F of a real model on a GPU, with the Triton kernels. `HostProgram` is the same on the CPU.

Everything is enqueued and nothing is read back, so a device may capture it: work depends on a launch's shape and on
device memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.device import Form, LaunchShape
from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.kernels.kernel_set import KernelSet
from runahead.runtime.kernels.ranks import DeviceRanks
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.forward.tuned_tilings import use_tuned_tilings
from runahead.runtime.kernels.triton.forward.tuning_report import tiling_counts
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products
from runahead.runtime.kernels.triton.gpu.compilation import compiling
from runahead.runtime.kernels.triton.gpu.kernel_cache import use_kernel_cache
from runahead.runtime.kernels.triton.row_state.drafts import make_draft_state
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState, make_mask_state
from runahead.runtime.kernels.triton.row_updates.prompt_logprobs import make_prompt_buffers
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows
from runahead.runtime.kernels.triton.sampling.sampler import (
    VerifiedTokens,
    make_sampler_buffers,
    make_vocab_part,
    sample_rows_cuda,
)
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import memory_of
from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork
from runahead.runtime.programs.cuda.drafter import GpuDrafter
from runahead.runtime.rounding import ceil_div


def keep_kernels(folder: str, called: str) -> None:
    """Keep compiled kernels in this folder, or in Triton's default if it is empty. Call before anything else here.

    called: the setting's name in messages. Raises OSError with a sentence that says what fails.
    """
    use_kernel_cache(folder, called)


def use_tuned() -> None:
    """Read the tilings that `runahead tune` left in the folder. Call after `keep_kernels`, before any kernel runs.

    Raises OSError with a sentence that names the unusable entry.
    """
    use_tuned_tilings()


def gpu_kernels() -> KernelSet:
    """Return the kernels of a `TritonProgram`'s decoder."""
    return TritonKernelSet()


def tilings_of(model: Decoder, buckets: Sequence[int]) -> dict[str, object]:
    """Return how many products of decode launches with these rows were measured on this GPU, by name, for the log at
    start."""
    divided = not model.ranks.shard.is_whole
    return tiling_counts(model.weights.layers, model.weights.lm_head, buckets, divided=divided)


def slots_with_drafts(max_rows: int, draft_rows: int) -> int:
    """Return how many of the lowest row slots may have drafts where rows may be held: each keeps its logits.

    It is twice the rows of a launch with drafts, since ended rows give their slots back late. draft_rows: most rows of
    such a launch.
    """
    return min(max_rows + 1, 2 * draft_rows)


class TritonProgram:
    """A `runahead.cuda_graphs.cuda_device.CudaProgram` over a `Decoder` on a GPU.

    num_blocks includes the null block. max_tokens: most query tokens of a launch. Logits stay by row slot, float32
    [max_rows + 1, vocab], from the row's F to its S, across other rows' launches. Padding, and chunks that are not
    sampled, leave theirs at the null slot, which nobody reads. A rank of several has the logits of its part of the
    vocabulary: in the plain form all ranks choose each token together, in the full form the first rank gathers them.

    drafts: most drafts of a row from a drafter; 0: no drafter. draft_rows: most rows of a launch that verifies drafts,
    which all decode; 0: none does. The logits of such a launch are by query token (`DraftState`), and
    a verified token has the bits of a plain step. masks: of rows with a grammar; None: no row
    has one. In launches that verify drafts, grammars' forced tokens are proposed too, up to `masks.drafts`, and all
    logits are by row slot, so that a held row keeps them until an S samples it. So only the lowest `slots_with_drafts`
    slots have drafts (`DraftState.kept_slots`). snapshots: number of recurrent-state snapshots, at every
    snapshot_tokens-th token of a row. head: a drafter with layers, instead of n-gram lookup. sampled_vocab: only ids
    below this may be sampled; None: all.

    Raises ValueError if a drafter may make more drafts of a row than masks can follow.
    """

    def __init__(
        self,
        model: Decoder,
        rings: RingMemory,
        *,
        max_rows: int,
        max_tokens: int,
        num_blocks: int,
        block_size: int,
        context_length: int,
        penalty_slots: int = 0,
        drafts: int = 0,
        draft_rows: int = 0,
        masks: MaskMemory | None = None,
        snapshots: int = 0,
        snapshot_tokens: int = 0,
        head: GpuDraftNetwork | None = None,
        sampled_vocab: int | None = None,
    ) -> None:
        if masks is not None and masks.drafts < drafts:
            raise ValueError(
                f"there are masks behind {masks.drafts} drafts of a row, and a drafter makes up to {drafts}"
            )
        most = max(drafts, 0 if masks is None else masks.drafts) if draft_rows else 0
        vocab, slots, verified = model.config.vocab_size, max_rows + 1, draft_rows * (1 + most)
        self._model, self._ranks, of_drafts = model, model.ranks, None
        if most:
            max_blocks, looked_up = ceil_div(context_length, block_size), context_length
            has_history = drafts and head is None and self._is_first  # which drafts for all
            of_drafts = make_draft_state(
                slots, looked_up if has_history else 0, max_blocks, draft_rows, most, model.device,
                kept_slots=slots_with_drafts(max_rows, draft_rows) if masks is not None else 0,
            )  # fmt: skip
        self.rows = DeviceRows(
            rings,
            max_rows=max_rows,
            max_tokens=max_tokens,
            block_size=block_size,
            context_length=context_length,
            vocab_size=vocab,
            device=model.device,
            penalty_slots=penalty_slots,
            drafts=of_drafts,
            masks=None if masks is None else make_mask_state(masks, model.device),
            keeps_states=any(kept.state for kept in memory_of(model.weights.layers).kept),
            snapshot_tokens=snapshot_tokens if snapshots else 0,
        )
        self.rows.ranks = model.ranks
        self._cache = model.make_cache(num_blocks, block_size, max_rows, snapshots, most)
        self._in_order = torch.arange(max(max_rows, verified), dtype=torch.int32, device=model.device)
        by_slot = slots + (0 if of_drafts is None else most * of_drafts.kept_slots)
        width = vocab // model.ranks.shard.of
        self._logits = torch.zeros((by_slot, width), dtype=torch.float32, device=model.device)
        self._verify_logits = self._logits
        if of_drafts is None or not of_drafts.holds:
            self._verify_logits = torch.zeros((verified, width), dtype=torch.float32, device=model.device)
        sizes = (vocab, rings.layout.max_top, model.device, sampled_vocab)
        self._sampler = make_sampler_buffers(max(max_rows, verified), *sizes)
        self._part = make_vocab_part(self._ranks, width, self._sampler)
        self._prompt = make_prompt_buffers(max_tokens, *sizes)
        self._head: GpuDrafter | None = None
        if head is not None:
            self._head = GpuDrafter(
                head, self.rows, self._sampler, num_blocks=num_blocks, block_size=block_size,
                context_length=context_length, vocab_size=vocab,
            )  # fmt: skip
            self.rows.guess = self._head.propose

    def sample(self, shape: LaunchShape) -> None:
        if not shape.sample_rows:
            return
        self._sample(shape)
        if not self._is_alone:
            self.rows.take_over_sampled(shape.sample_rows)

    @property
    def _is_alone(self) -> bool:
        return self._ranks.shard.is_whole

    @property
    def _is_first(self) -> bool:
        return self._ranks.shard.is_first

    def _sample(self, shape: LaunchShape) -> None:
        if shape.sample_drafts:
            self._verify(shape)
            return
        count = shape.sample_rows
        slots = self.rows.rows.sample_slots[:count]
        masks = self.rows.masks if shape.masked else None
        if masks is not None and self._is_first:
            self.rows.judge(count)
        sampled = self._sampled(self._logits, slots, slots, shape.form, None, masks)
        if sampled is not None:
            self.rows.advance(count, sampled)

    def _verify(self, shape: LaunchShape) -> None:
        """Sample all verified tokens as if every earlier draft were right, then cut each row off at its first miss."""
        drafts = self.rows.drafts
        assert drafts is not None
        verified = VerifiedTokens(1 + shape.sample_drafts, drafts.proposed)
        there = slice(shape.sample_rows * verified.width)
        slots, indexes = drafts.verify_slots[there], drafts.verify_logits[there]
        masks = self.rows.masks if shape.masked else None
        if masks is not None and self._is_first:
            self.rows.judge(shape.sample_rows, shape.sample_drafts)
        sampled = self._sampled(self._verify_logits, slots, indexes, shape.form, verified, masks)
        if sampled is not None:
            self.rows.advance(shape.sample_rows, sampled, shape.sample_drafts)

    def _sampled(
        self, logits: torch.Tensor, slots: torch.Tensor, indexes: torch.Tensor, form: Form,
        runs: VerifiedTokens | None, masks: MaskState | None,
    ) -> Sampled | None:  # fmt: skip
        """Return the tokens of these rows on the first rank, and None on others. indexes: of `logits`, a row each."""
        state, penalties, buffers = self.rows.state, self.rows.penalties, self._sampler
        part = self._part if form is Form.PLAIN else None
        if part is not None:
            buffers = part.buffers
        elif not self._is_alone:
            logits = cast(DeviceRanks, self._ranks).gather_rows(logits, indexes)
            indexes = self._in_order[: slots.shape[0]]
            if not self._is_first:
                return None
        sampled = sample_rows_cuda(logits, state, penalties, slots, form, buffers, indexes, runs, masks, part)
        return sampled if self._is_first else None

    def apply(self, shape: LaunchShape) -> int:
        self.rows.apply(shape.rows, shape.tokens, shape.is_decode, shape.drafts, forced=shape.forced)
        return 0  # the device counts what it reads

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        if shape.drafts:
            self._forward_verified(shape, between)
        elif not shape.is_closing:
            self._forward_rows(shape, between)

    def compiling(self) -> AbstractContextManager[None]:
        return compiling(self._ranks.shard.rank, self._ranks.shard.of)

    def warming_up(self) -> AbstractContextManager[None]:
        return choosing_products()

    def warm_up_layers(self, shape: LaunchShape) -> None:
        self.apply(shape)
        self._forward_rows(shape, unwatched, briefly=True)

    def _forward_rows(self, shape: LaunchShape, between: Callable[[], None], *, briefly: bool = False) -> None:
        """Run F of rows without drafts. briefly: see `Decoder.forward`."""
        batch = self.rows.batch(shape.rows, shape.tokens, shape.is_decode)
        read_hidden, seen = (None, None) if self._head is None else self._head.hidden_reader(shape.tokens)
        hidden = self._model.forward(batch, self._cache, between, read_hidden, briefly=briefly)
        last = hidden
        if not batch.is_decode:
            last = hidden.index_select(0, self.rows.queries.last_query[: shape.rows])
        slots = self.rows.logit_slots[: shape.rows]
        self._leave_logits(last, self._logits, slots)
        if shape.prompt_logprobs:
            self.rows.write_prompt_logprobs(hidden, batch, self._raw_logits, self._prompt)
        self.rows.write_finite(hidden, batch, self._prompt if shape.prompt_logprobs else None)
        if self._head is not None:
            self._head.follow(batch, hidden, seen)

    def _forward_verified(self, shape: LaunchShape, between: Callable[[], None]) -> None:
        """Run F of decode rows with their drafts."""
        drafts, batch = self.rows.drafts, self.rows.verify_batch(shape.rows, shape.drafts)
        assert drafts is not None
        token_batch = self.rows.token_batch(shape.rows, shape.drafts)
        read_hidden, seen = (None, None) if self._head is None else self._head.hidden_reader(batch.num_tokens)
        hidden = self._model.forward(token_batch, self._cache, between, read_hidden)
        indexes = (drafts.logits_slots if drafts.holds else self._in_order)[: batch.num_tokens]
        self._leave_logits(hidden, self._verify_logits, indexes)
        self.rows.write_finite(hidden, batch)
        if self._head is not None:
            self._head.follow(token_batch, hidden, seen)

    def _leave_logits(self, hidden: torch.Tensor, logits: torch.Tensor, indexes: torch.Tensor) -> None:
        weights, kernels = self._model.weights, self._model.kernels
        kernels.logits_into(hidden, weights.lm_head, logits, indexes, weights.logit_cap)

    def _raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of some prompt tokens, in the model's dtype, or in float32 if a tanh bounds them."""
        if self._model.weights.logit_cap or not self._is_alone:
            return self._model.logits(hidden)
        return self._model.kernels.linear(hidden, self._model.weights.lm_head)

    def reset(self, launched: int) -> None:
        self.rows.reset(launched)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self.rows.read()
