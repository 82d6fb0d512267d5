"""An engine that speaks the real protocol over a real Unix socket, and does what a test tells it to."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.figures import BOUNDS_S, EngineStats, EventStats, HistogramStats, Trace
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.kv_events import KvChange, KvQuery, KvReply
from runahead.runtime.wire.messages import PromptLaunches
from runahead.runtime.wire.parameters import FinishReason

TIMEOUT_S = 10.0

INFO = m.EngineInfo(
    model="fake",
    architecture="FakeForCausalLM",
    vocab_size=300,
    context_length=64,
    eos_token_ids=(256,),
    bos_token_id=-1,
    max_rows=8,
    max_queue=4,
    num_blocks=64,
    block_size=16,
    run_ahead=2,
    device="cpu",
    dtype="float32",
    parameters=1000,
    penalty_slots=4,
    prefix_cache=True,
    exactness=m.Exactness(True, "it costs little"),
    layers=(
        m.LayerKind(2, "attention", 24, "dense"),
        m.LayerKind(3, "attention", 0, "experts", m.ExpertCounts(8, 2, 1)),
        m.LayerKind(1, "mamba2", 0, "dense"),
    ),
    drafters=("ngram",),
    weights=(m.WeightFormat("fp8 per-channel", "float32", 21, 400, 500), m.WeightFormat("BF16", "float32", 3, 40, 80)),
    prompt_launches=PromptLaunches(32, 64, 96, "it is small"),
)

STATS = EngineStats(
    uptime_s=1.5,
    preparing=4,
    waiting=1,
    running=2,
    paused=1,
    finished={"LENGTH": 3},
    submitted=6,
    admitted=5,
    prompt_tokens=70,
    generated_tokens=80,
    void_rows=9,
    held_rows=3,
    drafted={1: 20, 2: 15},
    accepted={1: 12, 2: 4},
    tokens_per_launch=1.25,
    masks_orders_waiting=2,
    masks_written=60,
    masks_written_s=0.5,
    masks_grammars_compiled=4,
    masks_grammars_compiled_s=0.25,
    masks_grammars_known=7,
    masks_restarts=1,
    prefill_chunks=10,
    cached_tokens=48,
    queried_tokens=64,
    recomputed_tokens=32,
    aborted={"WAITING": 1, "DECODE": 2},
    blocks_reserved=15,
    blocks_adopted=12,
    blocks_returned=3,
    events={"admitted": EventStats(5, 4, 1), "paused": EventStats(2, 2, 0)},
    blocks_total=63,
    blocks_free=40,
    blocks_owned=20,
    blocks_fenced=3,
    blocks_cached=0,
    snapshots_total=4,
    snapshots_free=1,
    snapshots_owned=1,
    snapshots_fenced=0,
    snapshots_cached=2,
    snapshots_kept=5,
    snapshots_found=3,
    snapshots_skipped=7,
    rows_total=8,
    rows_free=5,
    rows_fenced=1,
    penalty_slots_total=16,
    penalty_slots_free=13,
    penalty_slots_fenced=1,
    run_ahead=2,
    ledger_depth=1,
    ledger_depth_max=2,
    held_back=3,
    launches=100,
    launches_retired=99,
    launches_by_kind={"decode": 90, "mixed": 10},
    launches_by_depth={1: 10, 2: 90},
    overlapped=95,
    firsts_after_idle=2,
    overlap_ratio=0.98,
    device_idle_s=0.25,
    device_busy_s=4.5,
    device_idle_inside_s=0.75,
    rank_wait_s={0: 0.25, 1: 0.125},
    host_s=0.5,
    waits=77,
    bytes_to_device=6400,
    graph_captures=0,
    graph_replays=0,
    fallbacks={"host_device": 100},
    barriers={"shutdown": 1},
    barrier_s={"shutdown": 0.125},
    deferred_releases=12,
    front_ends_lost=0,
    first_token=HistogramStats([1] + [0] * (len(BOUNDS_S) - 1) + [2], 2500.5),
    inter_token=HistogramStats([0] * (len(BOUNDS_S) + 1), 0.0),
    queue=HistogramStats([4] + [0] * len(BOUNDS_S), 0.00002),
    end_to_end=HistogramStats([0] * len(BOUNDS_S) + [3], 3500.5),
)


class FakeEngine:
    """One front end at a time. Reads on a thread of its own; a test speaks through `accept`, `output` and the rest.

    `submitted` and `cancelled` are queues, so that a test waits for what the front end says. With `auto_accept`,
    requests are accepted, and duplicates and aborts answered, as the engine does it.
    """

    def __init__(self, path: Path, welcome: m.Welcome | None = None) -> None:
        self.submitted: queue.Queue[m.Submit] = queue.Queue()
        self.cancelled: queue.Queue[int] = queue.Queue()
        self.cancel_reasons: dict[int, FinishReason] = {}  # by handle
        self.aborts: list[m.Abort] = []
        self.greeted = threading.Event()  # somebody has said Hello
        self.gone = threading.Event()  # the front end closed its end
        self.reads = threading.Event()  # what it is sent, as long as it is set
        self.reads.set()
        self.auto_accept = True
        self.answers_stats = True
        self.stats = STATS  # what it answers
        self.stats_queries = 0
        self.kv_queries: queue.Queue[int] = queue.Queue()  # that wait for an answer
        self.trace = Trace((), ())  # what it answers, too
        self.live: dict[str, int] = {}
        self.preparing: dict[str, int] = {}  # handles of those that are announced, by id
        self.announced: queue.Queue[m.Announce] = queue.Queue()
        self._welcome = welcome or m.Welcome(m.PROTOCOL_VERSION, "server-1", INFO)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._speaks = threading.Event()  # heartbeats, as long as it is set
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._heart.start()

    # ------------------------------------------------------------ what a test says

    def next_submit(self) -> m.Submit:
        return self.submitted.get(timeout=TIMEOUT_S)

    def kv_changes(self, *changes: KvChange, cleared: bool = False, is_whole: bool = True) -> None:
        """Answers the next question about the prefix cache, once it is asked."""
        self.send(KvReply(self.kv_queries.get(timeout=TIMEOUT_S), cleared, is_whole, changes))

    def next_cancel(self) -> int:
        return self.cancelled.get(timeout=TIMEOUT_S)

    def send(self, message: m.ToFrontEnd) -> None:
        with self._lock:
            self._say(message)

    def output(
        self,
        handle: int,
        tokens: Iterable[int],
        finish: FinishReason = FinishReason.NOT_FINISHED,
        stop_token_id: int = -1,
        logprobs: Sequence[m.Logprobs] = (),
        times_s: tuple[float, float, float, float] = (0.25, 0.5, 0.75, 1.25),
        cached_tokens: int = 0,
    ) -> None:
        """Tokens of one request in one message, and its end with the last one."""
        ids = np.array(list(tokens), "<i4")
        end = (m.Finished(handle, int(finish), stop_token_id, cached_tokens, *times_s),) if finish else ()
        if finish:
            self.live = {request_id: live for request_id, live in self.live.items() if live != handle}
        handles = np.full(len(ids), handle, "<i8")
        self.send(m.Output(1, handles.tobytes(), ids.tobytes(), tuple(logprobs), end))

    def prompt_logprobs(
        self,
        handle: int,
        offset: int,
        chosen: ArrayLike,
        top_ids: ArrayLike = (),
        top_logprobs: ArrayLike = (),
    ) -> None:
        """Log-probabilities of consecutive prompt tokens, the first of them at `offset`."""
        columns = np.array(chosen, "<f4"), np.array(top_ids, "<i4"), np.array(top_logprobs, "<f4")
        self.send(m.PromptLogprobs(handle, offset, *(column.tobytes() for column in columns)))

    def fall_silent(self) -> None:
        """It lives, and says nothing of its own accord from now on."""
        with self._lock:  # no heartbeat is on its way
            self._speaks.clear()

    def speak_again(self) -> None:
        self._speaks.set()

    def die(self) -> None:
        """Gone without a word."""
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self.reads.set()
        self._heart.join(TIMEOUT_S)
        self._listener.close()
        if self._socket is not None:
            self._socket.close()
        self._thread.join(TIMEOUT_S)

    # ------------------------------------------------------------ what the front end says

    def _read(self) -> None:
        try:
            self._socket, _ = self._listener.accept()
            reader = FrameReader()
            while self.reads.wait() and (data := self._socket.recv(1 << 16)):
                for body in reader.feed(data):
                    self._dispatch(m.decode_to_engine(body))
        except OSError:
            pass  # closed by the test
        finally:
            self.gone.set()

    def _dispatch(self, message: m.ToEngine) -> None:
        match message:
            case m.Hello():
                with self._lock:  # whoever has the welcome, and tells it to be silent, is not too early
                    self._speaks.set()
                    self._say(self._welcome)
                self.greeted.set()
            case m.Announce():
                self._announce(message)
            case m.Submit():
                self._submit(message)
            case m.Cancel(handle=handle, reason=reason):
                self.cancel_reasons[handle] = reason
                self.live = {request_id: live for request_id, live in self.live.items() if live != handle}
                self.preparing = {request_id: of for request_id, of in self.preparing.items() if of != handle}
                self.cancelled.put(handle)
            case m.Abort():
                self._abort(message)
            case m.StatsQuery(call=call):
                self.stats_queries += 1
                if self.answers_stats:
                    self.send(m.StatsReply(call, self.stats))
            case KvQuery(call=call):
                self.kv_queries.put(call)
            case m.TraceQuery(call=call, launches=launches):
                if self.answers_stats:
                    self.send(m.TraceReply(call, Trace(self.trace.launches[-launches:], self.trace.waits)))

    def _beat(self) -> None:
        while not self._closed.wait(m.HEARTBEAT_S / 10):
            with contextlib.suppress(OSError), self._lock:  # the front end is gone
                if self._speaks.is_set():
                    self._say(m.Heartbeat())

    def _say(self, message: m.ToFrontEnd) -> None:
        """For who holds the lock: one frame after the other."""
        assert self._socket is not None
        self._socket.sendall(m.encode_frame(message))

    def _announce(self, announce: m.Announce) -> None:
        if announce.request_id in {**self.live, **self.preparing}:
            self.send(m.Refused(announce.handle, "ALREADY_EXISTS", "in use", "request_id"))
        else:
            self.preparing[announce.request_id] = announce.handle
        self.announced.put(announce)

    def _submit(self, submit: m.Submit) -> None:
        if submit.announced and self.preparing.pop(submit.request_id, None) is None:
            return
        if self.auto_accept:
            if submit.request_id in self.live:
                self.send(m.Refused(submit.handle, "ALREADY_EXISTS", "in use", "request_id"))
                return
            if len(self.live) >= INFO.max_queue:
                self.send(m.Refused(submit.handle, "RESOURCE_EXHAUSTED", f"{INFO.max_queue} requests are waiting"))
                return
            self.live[submit.request_id] = submit.handle
            self.send(m.Accepted(submit.handle))
        self.submitted.put(submit)

    def _abort(self, abort: m.Abort) -> None:
        self.aborts.append(abort)
        known = {**self.live, **self.preparing}
        ids = tuple(i for i in known if i.startswith(abort.reach)) if abort.all_requests else abort.request_ids
        outcomes = []
        for request_id in ids:
            handle = known.get(request_id)
            outcomes.append("NOT_FOUND" if handle is None else "ABORTED")
            if self.preparing.pop(request_id, None) is not None:
                assert handle is not None
                self.send(m.Accepted(handle))
            if handle is not None:
                self.output(handle, (), FinishReason.ABORTED)
        self.send(m.AbortResult(abort.call, ids, tuple(outcomes)))
