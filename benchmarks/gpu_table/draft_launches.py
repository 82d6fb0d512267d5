"""Bare decode launches with drafts that are always right, and plain ones beside them.

The weights are random, and still every row's text is known before: each row goes round in a circle of tokens of its
own. The embedding is so large beside what layers add that the hidden state says which token came last, and the head's
line of a token is the embedding of the one before it in its circle. So the drafter finds every token in the row's
history, each launch keeps all it verifies, and layers see as many different tokens as texts have: positions of one row
name different experts.

On a GPU launches are graphs. On the CPU the same kernels run in Triton's interpreter, to try this file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.expert_counts import in_triton_kernels, named_while
from benchmarks.gpu_table.shapes import Shape, Workload
from runahead.cuda_graphs.buckets import GraphKey, Piece
from runahead.cuda_graphs.rings import STATUS_FAULT, RingLayout, RingMemory, allocate_rings
from runahead.cuda_graphs.shape import Form, LaunchShape
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.weights import dummy_weights
from runahead.runtime.plan import PLAN_WORDS, LaunchPlan, stage
from runahead.runtime.rounding import ceil_div
from runahead.runtime.wire.engine_config import DeviceName

if TYPE_CHECKING:
    from runahead.cuda_graphs.graph_pool import GraphPool
    from runahead.runtime.programs.triton import TritonProgram
    from runahead.runtime.programs.triton_head import GpuDraftNetwork

DRAFTS: Final = 3  # of a row
BLOCK_SIZE: Final = 16
_LOUD: Final = 32.0  # numbers of the embedding, in the mean: layers add less than a third of it
_AT_A_TIME: Final = 20  # of what is timed in one graph
_NO_APPENDS: Final = np.zeros((0, 3), np.int32)


def device_for(name: DeviceName) -> torch.device:
    """On which Triton's kernels run. Before any module of them is imported: on the CPU they are interpreted."""
    if name == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return torch.device(name)


def random_model(shape: Shape, device: torch.device, exact: bool, context: int) -> Decoder:
    """In the shape's dtype; on the CPU in float32, which the interpreter multiplies right."""
    from runahead.runtime.kernels.triton.kernel_set import TritonKernelSet

    config, kernels = shape.described(), TritonKernelSet(exact)
    dtype = config.dtype if device.type == "cuda" else torch.float32
    return Decoder(config, dummy_weights(config, dtype, device, kernels.pack_weight), kernels, context)


def context_of(workload: Workload) -> int:
    """Tokens that a row may hold."""
    return 256 * ceil_div(workload.prompt + workload.steps + 2 * (1 + DRAFTS), 256)


def program_of(
    model: Decoder, rings: RingMemory, context: int, exact: bool, head: GpuDraftNetwork | None = None
) -> TritonProgram:
    """With KV blocks for as many rows as the rings have cells for."""
    from runahead.runtime.programs.triton import TritonProgram

    rows = rings.layout.rows
    return TritonProgram(
        model, rings, max_rows=rows, max_tokens=rows,
        num_blocks=rows * ceil_div(context, BLOCK_SIZE) + 1, block_size=BLOCK_SIZE, context_length=context,
        drafts=DRAFTS, draft_rows=rows, exact=exact, head=head,
    )  # fmt: skip


def rings_for(rows: int, slots: int, device: torch.device) -> RingMemory:
    """slots: launches that may be staged at a time."""
    layout = RingLayout(slots, PLAN_WORDS, 1 << 12, rows, 4, DRAFTS, rows * (1 + DRAFTS))
    if device.type == "cpu":
        return allocate_rings(layout)
    from runahead.cuda_graphs.cuda_device import allocate_mapped_rings

    return allocate_mapped_rings(layout)


def hold(program: TritonProgram, rows: int, tokens: int, context: int) -> None:
    """The first row slots have rows of so many tokens, with blocks up to the end of the context and, where the model
    keeps any, a state that lacks the newest token alone."""
    state, each = program.rows.state, ceil_div(context, BLOCK_SIZE)
    slots = torch.arange(rows, device=state.seq_len.device)
    state.alive[:rows] = True
    state.seq_len[:rows] = tokens
    state.max_position[:rows] = context - 1
    state.state_slot[:rows] = slots
    program.rows.places.lengths[:rows] = tokens - 1
    state.block_table[:rows, :each] = 1 + slots[:, None] * each + torch.arange(each, device=slots.device)


class Circles:
    """Of rows: row r goes round in the tokens from r * period on."""

    def __init__(self, rows: int, period: int) -> None:
        self._rows, self._period = rows, period

    def tokens(self, count: int) -> torch.Tensor:
        """The rows' first so many, int32 [rows, count]."""
        place = torch.arange(count, dtype=torch.int32) % self._period
        return torch.arange(self._rows, dtype=torch.int32)[:, None] * self._period + place

    def told(self, model: Decoder) -> None:
        """The model says the next token of each circle. Its embedding is changed in place, and it has a head of its
        own. Raises BenchmarkError where it has not as many tokens."""
        weights, count = model.weights, self._rows * self._period
        if count > model.config.vocab_size:
            raise BenchmarkError(f"{count} tokens are needed, and the model has {model.config.vocab_size}")
        token = torch.arange(count, device=model.device)
        follows = token - token % self._period + (token + 1) % self._period
        head = weights.embedding.clone()
        head[follows] = weights.embedding[token]
        weights.embedding.mul_(_LOUD * model.config.hidden_size**0.5)
        model.weights = replace(weights, lm_head=model.kernels.pack_weight(head))


class LaunchBench:
    """A program of the shape, and launches with DRAFTS drafts of each row and with none."""

    def __init__(self, shape: Shape, device: torch.device, most_rows: int, exact: bool) -> None:
        workload = shape.workload
        self.launches = workload.steps // (2 * (1 + DRAFTS))  # that are measured at a time, all staged before
        self.context = workload.prompt + self.launches * (1 + DRAFTS) / 2  # of a row in the middle, drafts or none
        self._longest, self._prompt = context_of(workload), workload.prompt
        self.model = random_model(shape, device, exact, self._longest)
        self._circles = Circles(most_rows, workload.prompt // 4)
        self._circles.told(self.model)
        self._rings = rings_for(most_rows, self.launches + 2, device)
        self._program = program_of(self.model, self._rings, self._longest, exact)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._graphs: GraphPool | None = None
        if device.type == "cuda":
            from runahead.cuda_graphs.graph_pool import GraphPool

            self._stream = torch.cuda.Stream()
            self._graphs = GraphPool(self._stream)

    def capture(self, rows: int) -> tuple[int, int] | None:
        """Before launches of so many rows are timed. Returns the graphs' nodes, plain and with drafts; None where
        there are none."""
        if self._graphs is None:
            return None
        for drafts in (0, DRAFTS):
            with self._on_stream():
                self._whole(rows, drafts)  # compiles
            self._wait()
            self._graphs.capture(_key(rows, drafts), lambda drafts=drafts: self._whole(rows, drafts))  # type: ignore[misc]
        return self._graphs.nodes(_key(rows, 0)), self._graphs.nodes(_key(rows, DRAFTS))

    def step_ms(self, rows: int, drafts: int) -> float:
        """Of a launch, the mean of all. Raises BenchmarkError where a token was not kept, or a plan not found."""
        self._begin(rows, drafts)
        with self._on_stream():
            self._replay(rows, drafts)  # S has nothing to sample yet
            begin = self._mark()
            for _ in range(self.launches):
                self._replay(rows, drafts)
            end = self._mark()
        self._wait()
        self._check(rows, drafts)
        return _between_ms(begin, end) / self.launches

    def experts_named(self, rows: int, drafts: int) -> float:
        """In a layer, each counted once: the mean over layers and the same launches, without graphs."""
        lines = rows * (1 + drafts)
        return named_while(lambda: self._one_by_one(rows, drafts), self.model, lines, in_triton_kernels)

    def drafter_us(self, rows: int) -> float:
        """Of the drafter and what makes the query tokens of F, in the state that the launches have left."""
        return took_us(self._device, lambda: self._program.rows.draft(rows, DRAFTS))

    def _one_by_one(self, rows: int, drafts: int) -> None:
        self._begin(rows, drafts)
        with self._on_stream():
            for _ in range(1 + self.launches):
                self._whole(rows, drafts)
        self._wait()
        self._check(rows, drafts)

    def _replay(self, rows: int, drafts: int) -> None:
        if self._graphs is None:
            self._whole(rows, drafts)
        else:
            self._graphs.replay(_key(rows, drafts))

    def _whole(self, rows: int, drafts: int) -> None:
        shape = LaunchShape(
            0, rows, Form.PLAIN, rows, rows * (1 + drafts), True, drafts=drafts, sample_drafts=drafts
        )  # fmt: skip
        self._program.sample(shape)
        self._program.apply(shape)
        self._program.forward(shape)

    def _first(self, drafts: int) -> int:
        """Tokens of a row at the beginning: plain launches begin later, and both have the same contexts."""
        return self._prompt + self.launches * (DRAFTS - drafts) // 2

    def _begin(self, rows: int, drafts: int) -> None:
        """Rows that know where in their circles they are, and a plan for every launch."""
        program, rings, first = self._program, self._rings, self._first(drafts)
        program.reset(0)
        rings.status[:] = 0  # captures have found no plan
        hold(program, rows, first, self._longest)
        tokens = self._circles.tokens(first)[:rows].to(self._device)
        program.rows.state.last_token[:rows] = tokens[:, -1]
        assert program.rows.drafts is not None
        program.rows.drafts.history[:rows, :first] = tokens
        plan = LaunchPlan(
            0, np.arange(rows, dtype=np.int32), np.ones(rows, np.bool_), True, _NO_APPENDS, tokens=rows * (1 + drafts),
            is_decode=True, drafts=drafts,
        )  # fmt: skip
        for number in range(1, self.launches + 2):
            one = plan._replace(
                number=number, row_list_changed=number == 1, sample_rows=0 if number == 1 else rows,
                sample_drafts=0 if number == 1 else drafts,
            )  # fmt: skip
            slot = rings.slot(number)
            stage(one, rings.plan[slot], rings.bulk[slot])
        self._wait()

    def _check(self, rows: int, drafts: int) -> None:
        state, last = self._program.rows.state, self._first(drafts) + self.launches * (1 + drafts)
        lengths = sorted(set(state.seq_len[:rows].tolist()))
        if self._rings.status[:, STATUS_FAULT].any():
            raise BenchmarkError(f"{rows} rows, {drafts} drafts: a launch found no plan of its number")
        if lengths != [last] or not torch.equal(state.last_token[:rows].cpu().int(), self._tokens_at(last)[:rows]):
            raise BenchmarkError(f"{rows} rows, {drafts} drafts: rows of {lengths} tokens, and {last} were to be kept")

    def _tokens_at(self, length: int) -> torch.Tensor:
        return self._circles.tokens(length)[:, -1]

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


def _key(rows: int, drafts: int) -> GraphKey:
    return GraphKey(Piece.LAUNCH, rows, Form.PLAIN, drafts)


def took_us(device: torch.device, work: Callable[[], object]) -> float:
    """Microseconds of what `work` enqueues, many times in one graph; on the CPU, of doing it."""
    if device.type == "cpu":
        begun = time.perf_counter()
        work()
        return (time.perf_counter() - begun) * 1e6
    from runahead.runtime.programs.tuner import graph_us

    def many() -> None:
        for _ in range(_AT_A_TIME):
            work()

    return graph_us(many) / _AT_A_TIME


@contextlib.contextmanager
def opened_launches(shape: Shape, device: torch.device, most_rows: int, exact: bool) -> Iterator[LaunchBench]:
    """Load the shape's random weights, and give their memory back afterwards."""
    try:
        with torch.inference_mode():
            yield LaunchBench(shape, device, most_rows, exact)
    finally:
        free_memory(device)


def free_memory(device: torch.device) -> None:
    """Of what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
