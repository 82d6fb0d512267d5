"""Who is in the next launch, and what a launch's tokens mean. Pure: no clock, no device, no thread.

The scheduler never waits for a token: it plans from lengths alone, which it knows in advance. A row that turns out to
have ended is void in the launches already enqueued, one wasted row each, and nothing is rolled back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cuda_graphs.rings import NON_FINITE, STOPPED, TOKEN_MASK, VOID
from cuda_graphs.shape import Form, LaunchShape
from runtime.admission import admission_record, eos_and_stop_ids, needs_full, record_words
from runtime.block_pool import BlockPool
from runtime.ledger import Launch, Ledger, LedgerError
from runtime.plan import Admission, Chunk, LaunchPlan
from runtime.plan_builder import PlanBuilder
from runtime.request import FinishReason, SamplingParams, StoppingParams
from runtime.rows import RowPhase, Rows

NOT_A_TOKEN = -1
NO_SLOT = -1

# Members of an enum are looked up slowly; the steady step reads these thousands of times a second.
_PREFILL = int(RowPhase.PREFILL)
_DECODE = int(RowPhase.DECODE)


@dataclass(slots=True, eq=False)
class Request:
    """A request from the queue to its end. `slot` is NO_SLOT while it waits."""

    owner: int
    handle: int
    request_id: str
    prompt: NDArray[np.int32]  # [prompt tokens]
    sampling: SamplingParams
    stopping: StoppingParams
    max_len: int
    priority: int = 0
    order: int = 0
    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)

    @property
    def context_limited(self) -> bool:
        """It ends at the context's length, before its own max_tokens."""
        return self.max_len < self.prompt.size + self.stopping.max_tokens


@dataclass(frozen=True, slots=True)
class Release:
    """What a row gives back behind the fence: its blocks with its last F, its slot with the S after that."""

    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """A request has ended. stop_token_id: the id that ended it, or NOT_A_TOKEN."""

    request: Request
    reason: FinishReason
    stop_token_id: int = NOT_A_TOKEN


@dataclass(frozen=True, slots=True)
class Commit:
    """What a launch brought: columns over the rows whose token is kept, and the requests that ended with it."""

    launch: int
    cells: NDArray[np.intp]  # [n] place in the launch's result cells
    slots: NDArray[np.int32]  # [n]
    tokens: NDArray[np.int32]  # [n]
    owners: NDArray[np.int32]  # [n]
    handles: NDArray[np.int32]  # [n]
    firsts: NDArray[np.bool_]  # [n] the token is the first of its request
    endings: tuple[Ending, ...]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that every plan keeps. Words are int32 words of the rings' slots."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefill_chunk: int
    max_prefill_tokens: int
    plan_words: int
    bulk_words: int


class NeverFits(ValueError):
    """The request is larger than the whole pool; `prompt_alone`: so is its prompt without a completion."""

    def __init__(self, sentence: str, prompt_alone: bool) -> None:
        super().__init__(sentence)
        self.prompt_alone = prompt_alone


class Scheduler:
    """Requests and rows in, plans out; results in, commits out."""

    def __init__(self, limits: SchedulerLimits, rows: Rows, pool: BlockPool, ledger: Ledger[Release]) -> None:
        self.limits = limits
        self.rows = rows
        self.pool = pool
        self.ledger = ledger
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.waiting: list[Request] = []  # by priority, then arrival
        self.by_slot: list[Request | None] = [None] * rows.max_rows
        self._arrivals = 0

    # ------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NeverFits if the whole pool could not hold it."""
        if self._blocks_at_most(request) > self.pool.total:
            holds = self.pool.total * self.pool.block_size
            raise NeverFits(
                f"the request may grow to {request.max_len} tokens, {request.prompt.size} of them its prompt; "
                f"the KV cache holds {holds}",
                prompt_alone=request.prompt.size > holds,
            )
        self._arrivals += 1
        request.order = self._arrivals
        self.waiting.append(request)
        self.waiting.sort(key=_queue_order)
        self.counters["submitted"] += 1

    def stop(self, request: Request, reason: FinishReason) -> Ending:
        """End a request from outside, whatever its phase; its tokens in flight are void."""
        if request.slot == NO_SLOT:
            self.waiting.remove(request)
        else:
            self._end_row(request)
        self.finished[reason.name] += 1
        return Ending(request, reason)

    @property
    def running(self) -> int:
        return sum(request is not None for request in self.by_slot)

    def _blocks_at_most(self, request: Request) -> int:
        return self.pool.blocks_for(request.max_len - 1)  # the last token is never forwarded

    # ------------------------------------------------------------ planning

    def prompt_tokens_wanted(self) -> int:
        """Prompt tokens that the next plan would carry, at most."""
        chunks = int(np.count_nonzero(self.rows.phase == _PREFILL))
        if self.waiting and self.pool.may_promise(self._blocks_at_most(self.waiting[0])):
            chunks += min(len(self.waiting), self.rows.free)
        return min(self.limits.max_prefill_tokens, chunks * self.limits.prefill_chunk)

    def plan(self) -> LaunchPlan | None:
        """The next launch's plan, or None if no row can go on and nothing is left to sample.

        What it takes (blocks, slots) is taken: the plan must be launched.
        """
        builder = PlanBuilder(
            self.ledger.launched + 1, self.limits.plan_words, self.limits.bulk_words, self.limits.max_prefill_tokens
        )
        self._plan_decode(builder)
        self._plan_prefill(builder)
        self._admit(builder)
        last_slots, _, last_samples = self.ledger.last_rows()
        if not builder.has_rows and not self.ledger.owes_a_launch:
            return None
        return builder.build(last_slots, last_samples)

    def launch_of(self, plan: LaunchPlan, first: bool, overlapped: bool) -> Launch:
        """The ledger's record of a plan, and the shape that the device is told. first, overlapped: see `Launch`."""
        slots, epochs, samples = self.ledger.last_rows()
        sample_rows = slots.size if self.ledger.owes_a_launch else 0
        full = sample_rows and np.count_nonzero(self.rows.needs_full[slots[samples]])
        shape = LaunchShape(
            number=plan.number,
            sample_rows=sample_rows,
            form=Form.FULL if full else Form.PLAIN,
            rows=plan.rows.size,
            tokens=plan.tokens,
            max_seq_len=plan.max_seq_len,
        )
        self.rows.last_launch[plan.rows] = plan.number
        self.rows.last_naming[plan.rows] = plan.number + plan.samples
        return Launch(
            shape=shape,
            sample_slots=slots,
            sample_epochs=epochs,
            samples=samples,
            row_slots=plan.rows,
            row_epochs=self.rows.epoch[plan.rows],
            row_samples=plan.samples,
            prompt_tokens=sum(chunk.tokens.size for chunk in plan.chunks),
            overlapped=overlapped,
            first=first,
        )

    def _decodable(self) -> NDArray[np.bool_]:
        rows = self.rows
        decodable: NDArray[np.bool_] = (rows.phase == _DECODE) & (rows.planned_len < rows.max_len - 1)
        return decodable

    def _plan_decode(self, builder: PlanBuilder) -> None:
        """Every row past its prompt goes one token further; a row whose next block does not fit the plan waits."""
        rows, size = self.rows, self.pool.block_size
        slots = self._decodable().nonzero()[0]
        if not slots.size:
            return
        crossing = rows.planned_len[slots] >= rows.num_blocks[slots] * size
        if np.count_nonzero(crossing):
            room = builder.appends_left(slots.size)
            wanting = slots[crossing]
            for slot in wanting[:room].tolist():
                self._append_blocks(builder, slot, 1)
            if wanting.size > room:
                slots = np.setdiff1d(slots, wanting[room:], assume_unique=True)
        rows.planned_len[slots] += 1
        if slots.size:
            builder.decode(slots.astype(np.int32), int(rows.planned_len[slots].max()))

    def _plan_prefill(self, builder: PlanBuilder) -> None:
        """The next chunk of every row whose prompt is not planned, in the order of arrival, while the budget lasts."""
        slots = (self.rows.phase == _PREFILL).nonzero()[0].tolist()
        for slot in sorted(slots, key=lambda s: _queue_order(self._request(s))):
            if not self._plan_chunk(builder, slot):
                return

    def _admit(self, builder: PlanBuilder) -> None:
        """Waiting requests get a slot, their first blocks and their first chunk, first come first served."""
        while self.waiting and self.rows.free:
            request, limits = self.waiting[0], self.limits
            first = min(limits.prefill_chunk, request.prompt.size)
            words = record_words(request.sampling, request.stopping, limits.eos_token_ids, limits.vocab_size)
            if not builder.fits(first, self.pool.blocks_for(first), words):
                return
            if not self.pool.promise(self._blocks_at_most(request)):
                return
            self.waiting.pop(0)
            builder.admit(self._take_row(request))
            self.counters["admitted"] += 1
            self.counters["prompt_tokens"] += request.prompt.size
            if not self._plan_chunk(builder, request.slot):
                raise LedgerError("an admitted row's first chunk does not fit the plan that was measured for it")

    def _plan_chunk(self, builder: PlanBuilder, slot: int) -> bool:
        """Cut the next chunk at a multiple of the chunk size, a place that depends on the request alone."""
        rows, request = self.rows, self._request(slot)
        start = int(rows.planned_len[slot])
        end = min(start + self.limits.prefill_chunk, request.prompt.size)
        blocks = self.pool.blocks_for(end) - int(rows.num_blocks[slot])
        if not builder.fits(end - start, blocks, 0):
            return False
        self._append_blocks(builder, slot, blocks)
        last = end == request.prompt.size
        builder.chunk(Chunk(slot, start, request.prompt[start:end], last))
        rows.planned_len[slot] = end
        if last:
            rows.phase[slot] = _DECODE
        self.counters["prefill_chunks"] += 1
        return True

    def _append_blocks(self, builder: PlanBuilder, slot: int, count: int) -> None:
        request, have = self._request(slot), int(self.rows.num_blocks[slot])
        taken = self.pool.take(count)
        request.blocks += taken
        self.rows.num_blocks[slot] = have + count
        builder.append_blocks(slot, have, taken)

    def _take_row(self, request: Request) -> Admission:
        rows, limits = self.rows, self.limits
        slot = rows.take()
        request.slot = slot
        self.by_slot[slot] = request
        stops = eos_and_stop_ids(request.stopping, limits.eos_token_ids)
        rows.phase[slot] = _PREFILL
        rows.prompt_len[slot] = rows.committed_len[slot] = request.prompt.size
        rows.planned_len[slot] = rows.num_blocks[slot] = 0
        rows.max_len[slot] = request.max_len
        rows.min_position[slot] = request.prompt.size + request.stopping.min_tokens
        rows.needs_full[slot] = needs_full(request.sampling, request.stopping)
        rows.owner[slot], rows.handle[slot] = request.owner, request.handle
        rows.logprobs[slot] = request.sampling.logprobs
        rows.stop_ids[slot] = -1
        rows.stop_ids[slot, : len(stops)] = stops
        rows.stop_width = max(rows.stop_width, len(stops))
        sampling, stopping, prompt_len = request.sampling, request.stopping, request.prompt.size
        return Admission(
            slot,
            admission_record(
                slot, sampling, stopping, prompt_len, request.max_len, limits.eos_token_ids, limits.vocab_size
            ),
        )

    def _request(self, slot: int) -> Request:
        request = self.by_slot[slot]
        assert request is not None
        return request

    # ------------------------------------------------------------ commits

    def commit(self, launch: Launch, cells: NDArray[np.int64]) -> Commit:
        """Take a launch's result cells [sample_rows] into the host's truth.

        Raises LedgerError where the device's verdict on the end of a row is not the host's.
        """
        rows = self.rows
        kept = (launch.samples & rows.still(launch.sample_slots, launch.sample_epochs)).nonzero()[0]
        if kept.size < launch.samples.size:
            self.counters["void_rows"] += int(np.count_nonzero(launch.samples)) - kept.size
        slots = launch.sample_slots[kept]
        found = cells[kept]
        if np.count_nonzero((found >> 32) != launch.number):
            raise LedgerError(f"launch {launch.number}: its result slot holds another launch's tokens")
        low = (found & 0xFFFFFFFF).astype(np.int32)
        tokens = low & TOKEN_MASK
        if np.count_nonzero(low & VOID):
            raise LedgerError(f"launch {launch.number}: the device ended a row that goes on")
        positions = rows.committed_len[slots]
        wanted = rows.stop_ids[slots, : rows.stop_width]
        stops = np.logical_and((wanted == tokens[:, None]).any(1), positions >= rows.min_position[slots])
        failed = (low & NON_FINITE) != 0
        ended = stops | (positions + 1 >= rows.max_len[slots]) | failed
        if np.count_nonzero(ended != ((low & STOPPED) != 0)):
            raise LedgerError(f"launch {launch.number}: host and device disagree on which rows ended")
        rows.committed_len[slots] += ~failed
        rows.last_token[slots] = tokens
        owners, handles = rows.owner[slots], rows.handle[slots]
        endings = tuple(
            self._ending(int(slots[i]), int(tokens[i]), bool(stops[i]), bool(failed[i]))
            for i in ended.nonzero()[0].tolist()
        )
        if np.count_nonzero(failed):
            good = ~failed
            kept, slots, tokens = kept[good], slots[good], tokens[good]
            owners, handles, positions = owners[good], handles[good], positions[good]
        self.counters["generated_tokens"] += tokens.size
        firsts = positions == rows.prompt_len[slots]
        return Commit(launch.number, kept, slots, tokens, owners, handles, firsts, endings)

    def _ending(self, slot: int, token: int, stopped: bool, failed: bool) -> Ending:
        request = self._request(slot)
        reason = FinishReason.CONTEXT_LENGTH if request.context_limited else FinishReason.LENGTH
        if failed:
            reason = FinishReason.NON_FINITE
        elif stopped:
            is_eos = token in self.limits.eos_token_ids and not request.stopping.ignore_eos
            reason = FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
        self._end_row(request)
        self.finished[reason.name] += 1
        return Ending(request, reason, token if stopped and not failed else NOT_A_TOKEN)

    def _end_row(self, request: Request) -> None:
        """Void what is in flight, and put what the row holds behind the fence."""
        slot, rows = request.slot, self.rows
        self.pool.withdraw(self._blocks_at_most(request) - len(request.blocks))
        self.pool.fence(request.blocks)
        self.ledger.defer(int(rows.last_launch[slot]), Release(NO_SLOT, tuple(request.blocks)))
        self.ledger.defer(int(rows.last_naming[slot]), Release(slot, ()))
        request.blocks.clear()
        rows.fence(slot)
        self.by_slot[slot] = None
        request.slot = NO_SLOT

    def release(self, resource: Release) -> None:
        """The fence has let it go."""
        self.pool.release(resource.blocks)
        if resource.slot != NO_SLOT:
            self.rows.release(resource.slot)


def _queue_order(request: Request) -> tuple[int, int]:
    """Higher priority first, then first come first served."""
    return -request.priority, request.order
