"""The CUDA device: one stream, a captured graph for each decode launch and small mixed launch, marks polled in mapped
memory.

Such a launch is one graph replay. Other launches are enqueued in pieces on the same stream and counted by reason: S,
which is a graph, then apply and F. These are a second graph for launches with more prompt tokens, as long as the host
would need longer than the device, and for decode launches whose F has another number of drafts than S verifies. They
are enqueued kernel by kernel for launches with still more prompt tokens, with log-probabilities of prompts, or without
rows for F.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runahead.cuda_graphs import marks
from runahead.cuda_graphs.buckets import Buckets, GraphKey, Piece
from runahead.cuda_graphs.device import NEVER, DeviceCounters, DeviceError, Form, LaunchShape, Program
from runahead.cuda_graphs.enqueue_watch import EnqueueWatch, unwatched
from runahead.cuda_graphs.graph_pool import GraphPool
from runahead.cuda_graphs.rings import STATUS_BYTES, RingLayout, RingMemory, allocate_rings
from runahead.cuda_graphs.tail import TailPlacement

# Calls that the driver takes without waiting. A stream is documented to take 1,024; the rest is for a decode launch or
# a closing one behind them.
CALLS_AT_ONCE: Final = 960

_SPIN_S: Final = 20e-6  # spin time of a wait before it sleeps
_SLEEP_S: Final = 50e-6
_FAULT_CHECK_S: Final = 1e-3


class CudaProgram(Program, Protocol):
    """A program that can be captured: its work depends only on a launch's shape and on device memory."""

    def forward(self, shape: LaunchShape, between: Callable[[], None] = unwatched) -> None:
        """Run F. between: called after each enqueued piece, usually a layer."""

    def compiling(self) -> AbstractContextManager[None]:
        """Return a context for launches whose kernels are only compiled, by its end. They leave nothing behind."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Return a context for warm-up launches, in which the program may wait for the device to choose the fastest
        products."""

    def warm_up_layers(self, shape: LaunchShape) -> None:
        """Warm up: run apply and F, but not all of a model's equal layers."""

    def reset(self, launched: int) -> None:
        """Forget every launch and every row; the next is launch `launched` + 1. Only while nothing is in flight."""


class Taken(NamedTuple):
    """Bytes of GPU memory. launches: most that launches without a graph take while they run. graphs: all captured
    graphs and their shared memory."""

    launches: int
    graphs: int


def free_bytes() -> int:
    """Return the free bytes of the current GPU, including torch's cache."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def pinned(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
    """Return zeroed host memory that the device reads and writes in place.

    Raises OSError if there is none left, without a cause: the driver's "out of memory" here means the host's, which a
    smaller KV pool would not help.
    """
    try:
        array: NDArray[np.generic] = torch.from_numpy(np.zeros(shape, dtype)).pin_memory().numpy()
        return array
    except (MemoryError, RuntimeError) as error:
        why = str(error).split("\n")[0] or "there is no memory"
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raise OSError(f"{size} bytes of host memory can't be pinned for the GPU: {why}")


def allocate_mapped_rings(layout: RingLayout) -> RingMemory:
    """Return both rings in pinned, mapped memory. Raises OSError if there is none left."""
    return allocate_rings(layout, pinned)


class CudaDevice:
    """Runs a `CudaProgram` on one stream of the current CUDA device.

    stream: everything runs on it, in order. max_rows: of a launch; graphs are captured for the buckets up to it, at
    construction. mixed_tokens: query tokens of the largest mixed launch; the eager path is warmed up to it, and graphs
    of mixed launches are captured as far as buckets go. forward_tokens: see `Buckets.up_to`. progress: called with
    (graphs captured, all graphs). launched: the number before the first launch's. draft_forms: numbers of drafts, above
    0, of launches with up to draft_rows rows. masked: some rows may have a grammar, so S reads masks. forced_rows: see
    `Buckets.up_to`. is_trial: only the largest launch of each kind is warmed up and captured, to measure its memory,
    and nothing may be launched. marks_in: int64 [MARKS] of mapped memory where other processes read the marks; None:
    private memory. taken: bytes of GPU memory that construction took.
    """

    def __init__(
        self,
        program: CudaProgram,
        rings: RingMemory,
        *,
        max_rows: int,
        mixed_tokens: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
        launched: int = 0,
        draft_forms: Sequence[int] = (),
        draft_rows: int = 0,
        is_trial: bool = False,
        masked: bool = False,
        forced_rows: int = 0,
        forward_tokens: int = 0,
        marks_in: NDArray[np.int64] | None = None,
    ) -> None:
        self.rings = rings
        self.counters = DeviceCounters()
        self.graph_buckets = Buckets.up_to(
            max_rows, mixed_tokens, draft_forms, draft_rows, masked, forced_rows, forward_tokens
        )
        self.buckets, self.mixed_buckets = self.graph_buckets.rows, self.graph_buckets.mixed_tokens
        self.calls_at_once = CALLS_AT_ONCE
        self._program, self._mixed_tokens = program, mixed_tokens
        self.stream = torch.cuda.Stream()
        self.graphs = GraphPool(self.stream)
        self._counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._start_ns = torch.from_numpy(rings.start_ns)
        self._end_ns = torch.from_numpy(rings.end_ns)
        self._marks = pinned((marks.MARKS,), np.int64) if marks_in is None else marks_in
        self._marks_on_device = torch.from_numpy(self._marks)
        self._watch = EnqueueWatch(torch.cuda.Event)
        self._counted = launched  # the newest launch whose bytes are counted
        self._fault: Exception | None = None
        self._tail = TailPlacement()
        keys = self.graph_buckets.largest_keys() if is_trial else self.graph_buckets.every_key()
        with torch.inference_mode():
            tokens = () if is_trial else self.graph_buckets.pieces_tokens
            self._warm_up(keys, tokens, self._program.compiling(), self._program.warming_up())
            warm = torch.cuda.mem_get_info()[0]  # the allocator still has the launches' memory
            free = free_bytes()  # without what remains, such as loaded kernels
            if not is_trial:
                self._tail = self._measure_tail(keys)
            self._capture_all(keys, progress)
        self.taken = Taken(free - warm, free - free_bytes())
        # Kernel by kernel a launch takes about as many calls as its graph has nodes; products may be tiled differently.
        nodes = (self.graphs.nodes(key) for key in keys if key.piece is Piece.MIXED)
        self._in_pieces = max(nodes) * 5 // 4
        self._forget(launched)

    def hold_memory(self) -> None:
        """Reserve the memory of launches without a graph, for every size. Otherwise the allocator returns unused memory
        at each capture and query, and launches with prompts would wait for it. Call before anything is launched. Raises
        torch.OutOfMemoryError if there is not enough."""
        launched = int(self._marks[marks.ENDED])
        with torch.inference_mode():
            self._warm_up((), self.graph_buckets.pieces_tokens, self._program.warming_up())
        self._forget(launched)

    # ------------------------------------------------------------ the protocol

    def calls(self, shape: LaunchShape) -> int:
        return self.graph_buckets.calls(shape, self._in_pieces)

    def launch(self, shape: LaunchShape) -> None:
        try:
            with torch.cuda.stream(self.stream):
                self._enqueue(shape)
        except Exception as error:
            self._fail(error)

    def launch_eagerly(self, shape: LaunchShape) -> None:
        """Run `launch` kernel by kernel, without the launch's graph, to measure what the graph saves."""
        try:
            with torch.cuda.stream(self.stream), torch.inference_mode():
                self._whole(shape)
        except Exception as error:
            self._fail(error)
        self.rings.idle_ns[self.rings.slot(shape.number)] = 0

    def sampled(self) -> int:
        self._settle()
        return int(self._marks[marks.SAMPLED])

    def ended(self) -> int:
        self._settle()
        return int(self._marks[marks.ENDED])

    def in_tail(self) -> int:
        self._settle()
        return int(self._marks[marks.TAIL])

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        self.counters.waits += 1
        begun = time.monotonic()
        checked = begun
        seen = self._marks
        while seen[marks.SAMPLED] <= sampled and seen[marks.TAIL] <= in_tail and seen[marks.ENDED] <= ended:
            now = time.monotonic()
            if now - checked >= _FAULT_CHECK_S:
                checked = now
                self._check_fault()
            if now - begun >= timeout_s:
                return
            if now - begun >= _SPIN_S and select.select(wake_fds, [], [], _SLEEP_S)[0]:
                return

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        self.stream.synchronize()
        return self._program.read_rows()

    def close(self) -> None:
        try:
            self.stream.synchronize()
        except Exception as error:
            self._fault = self._fault or error
        self.graphs.clear()

    def launch_key(self, rows: int, form: Form, drafts: int = 0, masked: bool = False) -> GraphKey:
        """Return the graph of a decode launch with up to `rows` rows and `drafts` drafts of each in S and F. masked: S
        reads masks."""
        key = self.graph_buckets.launch_key(GraphKey(Piece.LAUNCH, rows, form, drafts, masked=masked).shape)
        assert key is not None, "every decode launch has a graph"
        return key

    # ------------------------------------------------------------ launches

    def _enqueue(self, shape: LaunchShape) -> None:
        whole = self.graph_buckets.launch_key(shape)
        if whole is not None:
            self.graphs.replay(whole)
            self.counters.graph_replays += 1
            self.rings.idle_ns[self.rings.slot(shape.number)] = 0
            return
        self._watch.begin()
        self.graphs.replay(self.graph_buckets.sample_key(shape))
        self._watch.first_piece()
        self.counters.graph_replays += 1
        self.counters.fallbacks[self.graph_buckets.why_none(shape)] += 1
        rest = self.graph_buckets.forward_key(shape)
        if rest is not None:
            self.graphs.replay(rest)
            self.counters.graph_replays += 1
            self._watch.piece()
        else:
            with torch.inference_mode():
                self._after_sampling(self.graph_buckets.padded(shape), self._watch.piece)
        self.rings.idle_ns[self.rings.slot(shape.number)] = self._watch.idle_ns

    def _sample(self, shape: LaunchShape, *, in_tail: bool = False) -> None:
        """Run S. in_tail: the rest of the launch is its tail, which needs no other mark."""
        marks.start(self._counter, self._start_ns)
        self._program.sample(shape)
        marks.sampled(self._counter, self._marks_on_device, in_tail=in_tail)

    def _after_sampling(
        self, shape: LaunchShape, between: Callable[[], None] = unwatched, *, in_tail: bool = False
    ) -> None:
        """Run apply and F. between: called after each enqueued piece; not while a graph is captured. in_tail: S has
        marked all of it as the tail."""
        left = -1 if in_tail else self._tail.layers_before(shape.tokens)

        def layer() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                marks.tail(self._counter, self._marks_on_device)
            between()

        if left == 0:
            marks.tail(self._counter, self._marks_on_device)
        self._program.apply(shape)
        between()
        if not shape.is_closing:
            self._program.forward(shape, layer)
        marks.ended(self._counter, self._marks_on_device, self._end_ns)
        between()

    def _whole(self, shape: LaunchShape) -> None:
        in_tail = self._tail.layers_before(shape.tokens) == 0
        self._sample(shape, in_tail=in_tail)
        self._after_sampling(shape, in_tail=in_tail)

    # ------------------------------------------------------------ capture

    def _warm_up(
        self, keys: Sequence[GraphKey], pieces_tokens: Sequence[int], *contexts: AbstractContextManager[None]
    ) -> None:
        """Run every kernel in these contexts, in order. pieces_tokens: query tokens of further launches, for which
        products have other kernels."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for context in contexts:
                with context:
                    self._run_each(keys, pieces_tokens)
        self.stream.synchronize()

    def _run_each(self, keys: Sequence[GraphKey], pieces_tokens: Sequence[int]) -> None:
        """Run a launch of each kind, the largest in pieces first, into whose memory the others fit. No plan is staged,
        so apply masks every row, and only the null block is written."""
        for key in keys:
            if key.piece in (Piece.LAUNCH, Piece.MIXED):
                self._whole(key.shape)
            elif key.tokens:
                self._program.warm_up_layers(key.shape)
        largest = self._mixed_shape(self._mixed_tokens)
        self._whole(largest)
        self._whole(largest._replace(rows=1))  # a single chunk may have special kernels
        if self.rings.layout.prompt_tokens:
            self._whole(largest._replace(prompt_logprobs=True))
        for tokens in sorted(pieces_tokens, reverse=True):  # the largest first, whose memory the next ones use
            self._program.warm_up_layers(self._mixed_shape(tokens))
        closing = LaunchShape(0, 1, Form.PLAIN, rows=0, tokens=0, is_decode=False)
        self._sample(closing)
        self._after_sampling(closing)

    def _mixed_shape(self, tokens: int) -> LaunchShape:
        """Return a mixed launch with as many rows as possible, since memory depends on them, too."""
        rows = min(self.buckets[-1], tokens)
        return LaunchShape(0, 1, Form.PLAIN, rows=rows, tokens=tokens, is_decode=False)

    def _capture_all(self, keys: Sequence[GraphKey], progress: Callable[[int, int], None]) -> None:
        """Capture all graphs, the largest first: the smaller ones fit into its memory."""
        for done, key in enumerate(keys):
            progress(done, len(keys))
            self.graphs.capture(key, self._work(key))
            self.counters.graph_captures += 1
        progress(len(keys), len(keys))

    def _work(self, key: GraphKey) -> Callable[[], None]:
        """Return what a graph captures."""
        work: dict[Piece, Callable[[LaunchShape], None]] = {
            Piece.LAUNCH: self._whole,
            Piece.MIXED: self._whole,
            Piece.SAMPLE: self._sample,
            Piece.FORWARD: self._after_sampling,
        }
        return partial(work[key.piece], key.shape)

    def _measure_tail(self, keys: Sequence[GraphKey]) -> TailPlacement:
        """Measure the longest launch and the shortest one, and count the layers. keys: largest first."""
        longest = next(key for key in keys if key.piece is not Piece.SAMPLE)
        shortest = next(key for key in reversed(keys) if key.piece is Piece.LAUNCH)
        layers = 0

        def layer() -> None:
            nonlocal layers
            layers += 1

        def forward() -> None:
            self._program.apply(longest.shape)
            self._program.forward(longest.shape, layer)

        graphs = GraphPool(self.stream)
        graphs.capture(longest, forward)
        graphs.capture(shortest, self._work(shortest))
        long_ms, short_ms = graphs.fastest_ms(longest), graphs.fastest_ms(shortest)
        graphs.clear()
        return TailPlacement(layers, short_ms, long_ms / longest.shape.tokens)

    def _forget(self, launched: int) -> None:
        """Reset counters, marks and row state to before the warm-up, on the host and on the device."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            self._program.reset(launched)
            self._counter.fill_(launched)
        self.stream.synchronize()
        self._marks[:] = launched
        self.rings.status[:] = 0
        self.rings.start_ns[:] = 0
        self.rings.end_ns[:] = 0

    # ------------------------------------------------------------ faults and figures

    def _settle(self) -> None:
        """Raise a known failure; count the bytes of launches that have ended since the last call."""
        if self._fault is not None:
            raise DeviceError(f"a launch failed: {self._fault}") from self._fault
        ended = int(self._marks[marks.ENDED])
        for number in range(self._counted + 1, ended + 1):
            self.counters.bytes_to_device += int(self.rings.status[self.rings.slot(number), STATUS_BYTES])
        self._counted = ended

    def _check_fault(self) -> None:
        try:
            self.stream.query()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._fault = self._fault or error
        raise DeviceError(f"a launch failed: {error}") from error
