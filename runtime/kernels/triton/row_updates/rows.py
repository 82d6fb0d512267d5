"""The row state on a GPU and its updates by S and apply: `runahead.runtime.programs.cpu.rows` as kernels, without
waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from runahead.cuda_graphs.rings import RingMemory
from runahead.runtime.kernels.forward_batch import ForwardBatch
from runahead.runtime.kernels.ranks import ONE_RANK, Ranks
from runahead.runtime.kernels.reference.sampling import Sampled
from runahead.runtime.kernels.row_state import make_penalty_state, make_row_state
from runahead.runtime.kernels.triton.drafting.ngram import LOOKUP_TILE, propose_kernel
from runahead.runtime.kernels.triton.row_state.drafts import DraftState, forget_drafts
from runahead.runtime.kernels.triton.row_state.grammar_masks import MaskState, judge
from runahead.runtime.kernels.triton.row_state.record import RowSizes
from runahead.runtime.kernels.triton.row_state.state_slots import make_state_slots
from runahead.runtime.kernels.triton.row_updates.apply_plan import apply_plan_kernel, make_row_list
from runahead.runtime.kernels.triton.row_updates.commit import ResultRing, advance_kernel
from runahead.runtime.kernels.triton.row_updates.finite import FINITE_TILE, finite_kernel
from runahead.runtime.kernels.triton.row_updates.inputs import TOKEN_TILE, make_query_buffers, queries_kernel
from runahead.runtime.kernels.triton.row_updates.prompt_logprobs import (
    PromptBuffers,
    find_targets,
    leave_prompt_logprobs,
)
from runahead.runtime.kernels.triton.row_updates.rank_rows import take_over_drafts, take_over_sampled
from runahead.runtime.kernels.triton.row_updates.verify_inputs import verify_inputs_kernel
from runahead.runtime.rounding import ceil_div
from runahead.runtime.row_record import PENALTY_TENSORS, ROW_TENSORS

# Proposes up to (second argument) tokens for each of the first (first argument) rows of F.
Guess = Callable[[int, int], None]


class DeviceRows:
    """Row state, row list and F's inputs at fixed addresses on `device`.

    rings: host views of mapped memory, which kernels access in place. max_tokens: most query tokens of a launch.
    context_length: bound of captured attention. drafts: None if no launch verifies any. masks: for rows with a grammar;
    None: no row has one. keeps_states: the model has a recurrent state for each row. snapshot_tokens: between two
    boundaries at which a row's state is kept; 0: none.
    """

    def __init__(
        self,
        rings: RingMemory,
        *,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        context_length: int,
        vocab_size: int,
        device: torch.device,
        penalty_slots: int = 0,
        drafts: DraftState | None = None,
        masks: MaskState | None = None,
        keeps_states: bool = False,
        snapshot_tokens: int = 0,
    ) -> None:
        self._max_blocks = max_blocks = ceil_div(context_length, block_size)
        boundaries = max_blocks * block_size // snapshot_tokens if snapshot_tokens else 0
        self._block_size = block_size
        assert drafts is None or drafts.block_tables.shape[1] == max_blocks
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._plan = torch.from_numpy(rings.plan)
        self._bulk = torch.from_numpy(rings.bulk)
        self._results = ResultRing(
            cells=torch.from_numpy(rings.cells),
            logprob=torch.from_numpy(rings.logprob),
            top_ids=torch.from_numpy(rings.top_ids),
            top_logprobs=torch.from_numpy(rings.top_logprobs),
            finite=torch.from_numpy(rings.finite),
            prompt_logprob=torch.from_numpy(rings.prompt_logprob),
            prompt_top_ids=torch.from_numpy(rings.prompt_top_ids),
            prompt_top_logprobs=torch.from_numpy(rings.prompt_top_logprobs),
            drafted=torch.from_numpy(rings.drafted),
            status=torch.from_numpy(rings.status),
        )
        # Launches whose plan was applied: S runs before its plan is.
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.state = make_row_state(max_rows, max_blocks + boundaries, vocab_size, device)
        self.penalties = make_penalty_state(penalty_slots, vocab_size, device)
        self.rows = make_row_list(max_rows, device)
        self.queries = make_query_buffers(max_rows, max_tokens, max_blocks + boundaries, device)
        replays = keeps_states and drafts is not None
        self.row_states = make_state_slots(max_rows, max_blocks, device, snapshot_tokens, replays=replays)
        self.drafts = drafts
        self.guess: Guess | None = None  # of a drafter with layers, set by its program
        self.ranks: Ranks = ONE_RANK  # the ranks of the model; the first one samples and drafts
        self.masks = masks
        self._held = None if masks is None else masks.held
        self._history = None if drafts is None or not drafts.has_drafter else drafts.history
        # Runs of rows that may be held: they outlive their F.
        self._runs = None if drafts is None or not drafts.holds else drafts
        assert drafts is None or drafts.holds == (masks is not None)
        indexes = max(self.rows.slots.shape[0], 0 if drafts is None else drafts.token_lens.shape[0])
        self._places = torch.arange(indexes + 1, dtype=torch.int32, device=device)

    @cached_property
    def sizes(self) -> RowSizes:
        """The constants of the kernels that update these rows."""
        results, state, drafts, padded = self._results, self.state, self.drafts, triton.next_power_of_2
        return RowSizes(
            SLOTS=self._plan.shape[0],
            PLAN_WORDS=self._plan.shape[1],
            BULK_WORDS=self._bulk.shape[1],
            STATUS_WORDS=results.status.shape[1],
            RING_ROWS=results.cells.shape[1],
            CELLS=results.cells.shape[2],
            MAX_TOP=results.top_ids.shape[3],
            TOP_PAD=padded(results.top_ids.shape[3]),
            VOCAB=self._vocab_size,
            CONTEXT=0 if self._history is None else self._history.shape[1],
            BLOCK_SIZE=self._block_size,
            BLOCKS=self._max_blocks,
            TABLE=state.block_table.shape[1],
            NULL_SLOT=state.slots - 1,
            ROWS_PAD=self.rows.slots.shape[0],
            MAX_STOP_IDS=state.stop_ids.shape[1],
            MAX_BIAS=state.bias_ids.shape[1],
            ALLOWED_WORDS=state.allowed.shape[1],
            SNAPSHOT_TOKENS=self.row_states.snapshot_tokens,
            REPLAYS=self.row_states.replays,
            DRAFTS=0 if drafts is None else drafts.most,
            DRAFTS_PAD=1 if drafts is None else padded(drafts.most),
            RUN_PAD=1 if drafts is None else padded(1 + drafts.most),
            DRAFT_ROWS_PAD=1 if drafts is None else padded(drafts.rows),
            KEPT=0 if drafts is None else drafts.kept_slots,
        )

    # ------------------------------------------------------------ S

    def judge(self, num_rows: int, count: int = 0) -> None:
        """Validate masks first in an S with grammars: which rows are held, and how many drafts of the others have
        masks. count: most drafts of a row that this S verifies.
        """
        assert self.masks is not None
        judge(num_rows, self.rows.sample_slots, self.state, self.masks, self._runs, 1 + count)

    def advance(self, num_rows: int, sampled: Sampled, count: int = 0) -> None:
        """Advance the sampled rows, count their tokens, end rows that stop, and store the result cells and, in the full
        form, log-probabilities. count: drafts of a row of the previous F. sampled: [num_rows * (1 + count)]; its field
        for rows with nothing left is set after `judge`.
        """
        empty = sampled.nothing_left
        found = sampled._replace(
            finite=sampled.finite.view(torch.int8), nothing_left=None if empty is None else empty.view(torch.int8)
        )
        advance_kernel[(num_rows,)](
            self.counter, self.rows.sample_slots, found, self.state.columns, self.penalties, self._history,
            self.drafts if count else None, None if empty is None else self.masks, self._results,
            0 if sampled.top_ids is None else sampled.top_ids.stride(0), 1 + count, SIZES=self.sizes,
            WIDTH_PAD=self.sizes.RUN_PAD if count else 1, num_warps=1,
        )  # fmt: skip

    def take_over_sampled(self, num_rows: int) -> None:
        """Copy the rows that S advanced from the first rank, if there are several."""
        take_over_sampled(num_rows, self.rows.sample_slots, self.state, self._held, self.ranks)

    # ------------------------------------------------------------ apply

    def apply(self, num_rows: int, num_tokens: int, is_decode: bool, drafts: int = 0, *, forced: bool = False) -> None:
        """Apply the plan in its staging slot; prepare `num_tokens` query tokens in `num_rows` rows of F.

        Both may exceed the plan's in a captured bucket. is_decode: every row decodes. drafts: of each row. forced: see
        `LaunchShape`.
        """
        apply_plan_kernel[(1,)](
            self.counter, self._plan, self._bulk, self._results.status, self.rows, self.state.columns, self.penalties,
            self._history, self._held, None if self._runs is None else self._runs.guesses, SIZES=self.sizes,
            num_warps=1,
        )  # fmt: skip
        if drafts:
            self.draft(num_rows, drafts, forced=forced)
        elif num_rows:
            self.prepare_queries(num_rows, num_tokens, is_decode)

    def prepare_queries(self, num_rows: int, num_tokens: int, is_decode: bool) -> None:
        """Prepare the query tokens of the list's first `num_rows` entries: a decode row's newest token, a chunk's from
        this launch's bulk slot.

        is_decode: every row has one, and num_tokens is `num_rows`; otherwise both may exceed the plan's. Ended rows and
        entries past the list get length 0 and a slot in the null block, like query tokens of no row. Held rows have no
        query token and write no logits; rows of this F that are not held have no drafts.
        """
        assert not is_decode or num_tokens == num_rows
        tile = 1 if is_decode else TOKEN_TILE
        queries_kernel[(num_rows, 1) if is_decode else (num_rows + 1, ceil_div(num_tokens, tile))](
            self.counter, self._bulk, self.rows, self.state.columns, self.queries, self.row_states, self._history,
            self._held, None if self._runs is None else self._runs.drafted, num_rows, num_tokens, SIZES=self.sizes,
            RAGGED=not is_decode, TOKENS=tile, num_warps=1,
        )  # fmt: skip

    def draft(self, num_rows: int, count: int, *, forced: bool = False) -> None:
        """Propose up to `count` tokens for each row of F, by its grammar or the drafter, and prepare its query tokens.
        forced: no guesses, only grammar-forced drafts; a drafter with layers takes no step.
        """
        assert self.drafts is not None and num_rows <= self.drafts.rows
        slots = self.rows.slots
        if self.ranks.shard.is_first:
            self._propose(num_rows, count, forced=forced)
        if not self.ranks.shard.is_whole:
            take_over_drafts(num_rows, count, slots, self.drafts.proposed, self.drafts.drafted, self.ranks)
        self.prepare_verified(num_rows, 1 + count)

    def prepare_verified(self, num_rows: int, width: int) -> None:
        """Prepare the num_rows * width query tokens of F, and the indexes of their logits for the next S, after the
        drafts were proposed. width: 1 + K of the launch."""
        drafts = self.drafts
        assert drafts is not None
        verify_inputs_kernel[(drafts.rows, width)](
            self.rows.slots, self.state.columns, drafts, self._held, self.row_states, num_rows, width,
            SIZES=self.sizes, num_warps=1,
        )  # fmt: skip

    def _propose(self, num_rows: int, count: int, *, forced: bool) -> None:
        """Propose drafts of rows that decode: forced tokens of a grammar if any, else at most the plan's allowed
        guesses. Ended rows and entries past the list get none, nor is anything proposed at or beyond a row's end; held
        rows keep theirs."""
        drafts, masks, context = self.drafts, self.masks, self.sizes.CONTEXT
        assert drafts is not None and 0 < count <= drafts.most
        proposes = drafts.has_drafter or masks is not None
        assert proposes or self.guess is not None, "nobody proposes anything"
        if proposes:
            words = 1 if masks is None else masks.forced.shape[1]
            propose_kernel[(num_rows,)](
                self.rows.slots, self.state.columns, drafts, masks, count, SIZES=self.sizes, WORDS=words,
                WORDS_PAD=triton.next_power_of_2(words),
                ACQUIRE=masks is not None and masks.held.device.type != "cpu",
                TILE=min(LOOKUP_TILE, triton.next_power_of_2(max(context, 1))), num_warps=8 if context else 1,
            )  # fmt: skip
        if self.guess is not None:
            self.guess(num_rows, 0 if forced else count)

    # ------------------------------------------------------------ F

    @property
    def logit_slots(self) -> torch.Tensor:
        """The row slot for each row's logits, int32 [R], the null slot for none."""
        return self.rows.sample_slots if self.masks is None else self.queries.logit_slots

    def batch(self, num_rows: int, num_tokens: int, is_decode: bool) -> ForwardBatch:
        """Return F's inputs: views of the buffers that apply has filled, for the same numbers."""
        queries = self.queries
        starts = self._places if is_decode else self.rows.query_start_loc
        return ForwardBatch(
            token_ids=queries.token_ids[:num_tokens],
            positions=queries.positions[:num_tokens],
            slot_mapping=queries.slot_mapping[:num_tokens],
            query_start_loc=starts[: num_rows + 1],
            seq_lens=queries.seq_lens[:num_rows],
            block_tables=queries.block_tables[:num_rows],
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_seq_len=self._context_length,
            is_decode=is_decode,
            **self.row_states.of(num_rows),
        )

    def verify_batch(self, num_rows: int, count: int) -> ForwardBatch:
        """Return F's inputs in a launch with `count` drafts of a row: query tokens by row (`DraftState`). If each query
        token has a block table, kernels that read block tables use `token_batch`.
        """
        assert self.drafts is not None
        drafts, lines = self.drafts, num_rows * (1 + count)
        return ForwardBatch(
            token_ids=drafts.token_ids[:lines],
            positions=drafts.positions[:lines],
            slot_mapping=drafts.slot_mapping[:lines],
            query_start_loc=drafts.query_start_loc[: num_rows + 1],
            seq_lens=drafts.seq_lens[:num_rows],
            block_tables=drafts.block_tables[:num_rows],
            num_tokens=lines,
            num_rows=num_rows,
            max_seq_len=self._context_length,
            is_decode=True,
            decode_queries=1 + count,
            **self.row_states.of(num_rows),
        )

    def token_batch(self, num_rows: int, count: int) -> ForwardBatch:
        """Return the same with each query token as a row with a block table. States are the rows'."""
        assert self.drafts is not None
        lines, in_rows = num_rows * (1 + count), self.verify_batch(num_rows, count)
        no_states: dict[str, Any] = dict.fromkeys(self.row_states.of(0))
        return replace(
            in_rows,
            query_start_loc=self._places[: lines + 1],
            seq_lens=self.drafts.token_lens[:lines],
            block_tables=self.drafts.block_tables[:lines],
            num_rows=lines,
            decode_queries=1,
            in_rows=in_rows,
            **no_states,
        )

    def write_finite(self, hidden: torch.Tensor, batch: ForwardBatch, prompt: PromptBuffers | None = None) -> None:
        """Write the finite flag of every row of `batch`, from its final hidden states, in [T, hidden].

        prompt: the buffers after `write_prompt_logprobs`, whose logits count too.
        """
        finite_kernel[(batch.num_rows,)](
            self.counter, hidden, batch.query_start_loc, batch.seq_lens,
            None if prompt is None else (prompt.wanted, prompt.partial_max), self._results.finite, SIZES=self.sizes,
            HIDDEN=hidden.shape[1], PEAKS=0 if prompt is None else prompt.partial_max.shape[1], TILE=FINITE_TILE,
            num_warps=8,
        )  # fmt: skip

    def write_prompt_logprobs(
        self,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        buffers: PromptBuffers,
    ) -> None:
        """Write log-probabilities of prompts that asked for them. hidden: [T, hidden]. logits_of: [n, hidden] to [n,
        vocab].
        """
        find_targets(
            batch.num_rows, batch.num_tokens, self.counter, self._bulk, self.rows, self.state, buffers, self.sizes
        )
        leave_prompt_logprobs(self.counter, hidden, logits_of, buffers, self._results)

    # ------------------------------------------------------------ beside the chain

    def reset(self, launched: int = 0) -> None:
        """Forget every launch and row; the next launch is `launched` + 1. Call it only while nothing is in flight."""
        self.counter.fill_(launched)
        null_slot = self.state.slots - 1
        fresh = make_row_state(null_slot, self.state.block_table.shape[1], self._vocab_size, self.counter.device)
        for name in ROW_TENSORS:
            getattr(self.state, name).copy_(getattr(fresh, name))
        self.row_states.lengths.zero_()
        if self.drafts is not None:
            forget_drafts(self.drafts)
        if self._held is not None:
            self._held.zero_()
        self.penalties.counts.zero_()
        self.penalties.in_prompt.zero_()
        self.rows.slots.fill_(null_slot)
        self.rows.sample_slots.fill_(null_slot)

    def read(self) -> Mapping[str, NDArray[np.generic]]:
        """Copy row state and penalty state to the host, by field name. Call it only while nothing is in flight."""
        tensors = {name: getattr(self.state, name) for name in ROW_TENSORS}
        tensors |= {name: getattr(self.penalties, name) for name in PENALTY_TENSORS}
        if self.row_states.snapshot_tokens:  # after a row's blocks
            tensors["snapshots"] = self.state.block_table[:, self._max_blocks :]
        if self._history is not None:
            tensors["history"] = self._history
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
