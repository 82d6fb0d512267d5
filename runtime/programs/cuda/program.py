"""S, apply and F of a real model on a GPU, with the Triton kernels. `HostProgram` is the same on the CPU.

Everything is enqueued and nothing is read back, so a device may capture it: work depends on a launch's shape and on
device memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs.enqueue_watch import unwatched
from runahead.cuda_graphs.rings import RingMemory
from runahead.cuda_graphs.shape import LaunchShape
from runahead.runtime.kernels.kernel_set import KernelSet
from runahead.runtime.kernels.triton.forward import exactness
from runahead.runtime.kernels.triton.forward.kernel_set import TritonKernelSet
from runahead.runtime.kernels.triton.forward.tuned_tilings import use_tuned_tilings
from runahead.runtime.kernels.triton.forward.tuning_report import tiling_counts
from runahead.runtime.kernels.triton.gemm.cublaslt import choosing_products
from runahead.runtime.kernels.triton.gpu.kernel_cache import use_kernel_cache
from runahead.runtime.kernels.triton.ops.put_rows import put_rows
from runahead.runtime.kernels.triton.row_state.drafts import make_draft_state
from runahead.runtime.kernels.triton.row_state.grammar_masks import make_mask_state
from runahead.runtime.kernels.triton.row_updates.prompt_logprobs import make_prompt_buffers
from runahead.runtime.kernels.triton.row_updates.rows import DeviceRows
from runahead.runtime.kernels.triton.sampling.sampler import Runs, make_sampler_buffers, sample_rows_cuda
from runahead.runtime.masks.mask_memory import MaskMemory
from runahead.runtime.models.architecture import ModelWeights
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.memory import memory_of
from runahead.runtime.programs.cuda.draft_model import GpuDraftNetwork
from runahead.runtime.programs.cuda.drafter import GpuDrafter
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.messages import Exactness


def keep_kernels(folder: str, called: str) -> None:
    """Before anything else here. Compiled kernels are kept in this folder, or in Triton's own where it is empty.

    called: what messages call the setting. Raises an OSError whose sentence says what can't be done.
    """
    use_kernel_cache(folder, called)


class NoExactKernelsError(ValueError):
    """They are asked for, and the model has none. The end of a sentence that says why."""


def use_tuned() -> None:
    """After `keep_kernels`, before any kernel runs: reads what `runahead tune` has left in the folder.

    Raises an OSError whose sentence says which entry can't be used.
    """
    use_tuned_tilings()


def exactness_of(weights: ModelWeights, dtype: torch.dtype, asked: str) -> Exactness:
    """Whether the kernels of a `TritonProgram` are to be exact.

    weights: of the model, which may be without memory or values. asked: on, off or auto.

    Raises NoExactKernelsError where that is asked for and can't be.
    """
    impossible = exactness.why_impossible(weights.layers, dtype)
    if asked == "on" and impossible:
        raise NoExactKernelsError(impossible)
    return exactness.choose_exactness(asked, impossible, exactness.costs_little(weights.layers))


def gpu_kernels(exact: bool) -> KernelSet:
    """The kernels for which a `TritonProgram`'s decoder is loaded. exact: no row's bits depend on the rows beside
    it."""
    return TritonKernelSet(exact)


def tilings_of(model: Decoder, buckets: Sequence[int], exact: bool) -> dict[str, object]:
    """How many products of decode launches of so many rows were measured on this GPU, by name: logged at start. exact:
    by the exact kernels."""
    return tiling_counts(model.weights.layers, model.weights.lm_head, buckets, exact)


def slots_with_drafts(max_rows: int, draft_rows: int) -> int:
    """Row slots, the lowest, of which drafts are proposed where rows may be held: each keeps the logits of its run.
    Twice as many as a launch with drafts has rows, since those that have ended give their slots back late. draft_rows:
    of such a launch, at most."""
    return min(max_rows + 1, 2 * draft_rows)


class TritonProgram:
    """A `runahead.cuda_graphs.cuda_device.CudaProgram` over a `Decoder` on a GPU.

    num_blocks counts the null block. max_tokens: query tokens of a launch, at most. Logits stay by row slot, float32
    [max_rows + 1, vocab], from the row's F to its S, whatever other rows the launches between have. Places of padding,
    and chunks that sample nothing, leave theirs at the null slot, where nobody reads.

    drafts: of a row and launch that a drafter makes, at most; 0: there is none. draft_rows: of a launch that verifies
    drafts, at most, which all decode; 0: none does. The logits of such a launch lie line by line (`DraftState`). exact:
    the model's kernels are exact, and drafts are verified so that a line has the bits of a plain step. masks: of rows
    with a grammar; None: no row has one. Where launches verify drafts, what grammars force is proposed too, up to
    `masks.drafts` tokens, and all logits lie by row slot: a row that is held has its run until an S takes it. So
    something is proposed for the lowest `slots_with_drafts` alone (`DraftState.kept_slots`). snapshots: of recurrent
    states, that there is room for, at every snapshot_tokens-th token of a row. head: a drafter with layers, in the
    place of the one that looks up what followed before. sampled_vocab: ids below this may be sampled; None: all.

    Raises ValueError where a drafter may make more drafts of a row than there can be masks behind.
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
        exact: bool = False,
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
        vocab, slots, lines = model.config.vocab_size, max_rows + 1, draft_rows * (1 + most)
        of_drafts = None
        if most:
            max_blocks, looked_up = ceil_div(context_length, block_size), context_length
            of_drafts = make_draft_state(
                slots, looked_up if drafts and head is None else 0, max_blocks, draft_rows, most, exact, model.device,
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
        self._model = model
        self._ranks = self.rows.ranks = model.ranks
        self._exact = exact
        self._cache = model.make_cache(num_blocks, block_size, max_rows, snapshots, most)
        self._in_order = torch.arange(max(max_rows, lines), dtype=torch.int32, device=model.device)
        by_slot = slots + (0 if of_drafts is None else most * of_drafts.kept_slots)
        self._logits = torch.zeros((by_slot, vocab), dtype=torch.float32, device=model.device)
        self._run_logits = self._logits
        if of_drafts is None or not of_drafts.holds:
            self._run_logits = torch.zeros((lines, vocab), dtype=torch.float32, device=model.device)
        sizes = (vocab, rings.layout.max_top, model.device, sampled_vocab)
        self._sampler = make_sampler_buffers(max(max_rows, lines), *sizes)
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
        if self._ranks.share.is_first:
            self._sample(shape)
        if not self._ranks.share.is_whole:
            self.rows.take_over_sampled(shape.sample_rows)

    def _sample(self, shape: LaunchShape) -> None:
        if shape.sample_drafts:
            self._verify(shape)
            return
        count = shape.sample_rows
        slots = self.rows.rows.sample_slots[:count]
        masks = self.rows.masks if shape.masked else None
        if masks is not None:
            self.rows.judge(count)
        sampled = sample_rows_cuda(
            self._logits, self.rows.state, self.rows.penalties, slots, shape.form, self._sampler, logit_rows=slots,
            masks=masks,
        )  # fmt: skip
        if sampled.logprob is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
            self.rows.write_logprobs(count, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
        self.rows.advance(count, sampled.tokens, sampled.finite, sampled.nothing_left)

    def _verify(self, shape: LaunchShape) -> None:
        """Runs: each of their tokens is sampled as if all drafts before it were right, then they are cut off."""
        drafts = self.rows.drafts
        assert drafts is not None
        runs = Runs(1 + shape.sample_drafts, drafts.proposed)
        there = slice(shape.sample_rows * runs.width)
        state, penalties, slots = self.rows.state, self.rows.penalties, drafts.run_slots[there]
        masks = self.rows.masks if shape.masked else None
        if masks is not None:
            self.rows.judge(shape.sample_rows, shape.sample_drafts)
        sampled = sample_rows_cuda(
            self._run_logits, state, penalties, slots, shape.form, self._sampler, drafts.run_lines[there], runs, masks
        )
        self.rows.advance_runs(shape.sample_rows, shape.sample_drafts, sampled)

    def apply(self, shape: LaunchShape) -> int:
        self.rows.apply(shape.rows, shape.tokens, shape.is_decode, shape.drafts, forced=shape.forced)
        return 0  # the device counts what it reads

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        if shape.drafts:
            self._forward_runs(shape, between)
        elif not shape.is_closing:
            self._forward_rows(shape, between)

    def warming_up(self) -> AbstractContextManager[None]:
        return choosing_products()

    def meet(self, shape: LaunchShape) -> None:
        self.apply(shape)
        self._forward_rows(shape, unwatched, briefly=True)

    def _forward_rows(self, shape: LaunchShape, between: Callable[[], None], *, briefly: bool = False) -> None:
        """F of rows without drafts. briefly: see `Decoder.forward`."""
        batch = self.rows.batch(shape.rows, shape.tokens, shape.is_decode)
        look, seen = (None, None) if self._head is None else self._head.looking(shape.tokens)
        hidden = self._model.forward(batch, self._cache, between, look, briefly=briefly)
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

    def _forward_runs(self, shape: LaunchShape, between: Callable[[], None]) -> None:
        """F of rows that all decode, with their drafts."""
        drafts, batch = self.rows.drafts, self.rows.run_batch(shape.rows, shape.drafts)
        assert drafts is not None
        lines = self.rows.line_batch(shape.rows, shape.drafts) if self._exact else batch
        look, seen = (None, None) if self._head is None else self._head.looking(batch.num_tokens)
        hidden = self._model.forward(lines, self._cache, between, look)
        places = (drafts.line_places if drafts.holds else self._in_order)[: batch.num_tokens]
        self._leave_logits(hidden, self._run_logits, places)
        self.rows.write_finite(hidden, batch)
        if self._head is not None:
            self._head.follow(lines, hidden, seen)

    def _leave_logits(self, hidden: torch.Tensor, logits: torch.Tensor, places: torch.Tensor) -> None:
        weights, kernels = self._model.weights, self._model.kernels
        if self._ranks.share.is_whole:
            kernels.logits_into(hidden, weights.lm_head, logits, places, weights.logit_cap)
            return
        part = torch.empty((hidden.shape[0], weights.lm_head.shape[0]), dtype=torch.float32, device=hidden.device)
        kernels.logits_into(hidden, weights.lm_head, part, self._in_order[: hidden.shape[0]], weights.logit_cap)
        whole = self._ranks.gather(part)
        if self._ranks.share.is_first:
            put_rows(whole, logits, places)

    def _raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the model's dtype, or float32 where a tanh bounds them: of some prompt tokens at a time."""
        if self._model.weights.logit_cap or not self._ranks.share.is_whole:
            return self._model.logits(hidden)
        return self._model.kernels.linear(hidden, self._model.weights.lm_head)

    def reset(self, launched: int) -> None:
        self.rows.reset(launched)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self.rows.read()
