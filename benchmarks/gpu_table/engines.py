"""An engine over random weights, in this process, with the real scheduler, loop and device and one front end in memory.

It is put together as the service puts it together, but for two things. Where bare graphs are measured, the rings have a
slot for every launch of a run, so that all of them may be staged before the first one runs; a launch does the same work
whatever the number of slots. And a whole batch is taken from the front end in one turn of the loop: the service takes a
few requests a turn, and where enqueueing a prompt takes the host longer than the GPU needs for it, the first rows of a
large batch would have all of their tokens before the last ones begin.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu_table.errors import BenchmarkError
from benchmarks.gpu_table.settings import RUN_AHEAD, Settings
from benchmarks.gpu_table.shapes import Shape
from runahead.cuda_graphs.device import NEVER, Device, Form, LaunchShape
from runahead.runtime.checkpoint import Checkpoint, open_checkpoint
from runahead.runtime.engine.loop import Engine
from runahead.runtime.models.config.model_config import ModelConfig
from runahead.runtime.models.decoder import Decoder
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.cpu import make_on_cpu
from runahead.runtime.process.parts import MadeOnDevice, check_model, make_scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig, check_config
from runahead.runtime.wire.parameters import FinishReason

_REQUEST_WORK: Final = 8  # as the intake counts work: more than a request with the longest prompt of any part is


class FrontEnd:
    """Asks for completions and counts what comes. heard: called with all tokens that come together."""

    def __init__(self) -> None:
        self.heard: Callable[[m.Output], None] = lambda output: None
        self.inbox: list[m.ToEngine] = []
        self.tokens = 0
        self.endings: list[int] = []  # reasons

    def receive(self) -> Iterator[tuple[int, m.ToEngine | None]]:
        while self.inbox:
            yield 1, self.inbox.pop(0)

    @property
    def has_more(self) -> bool:
        return bool(self.inbox)

    def send(self, owner: int, message: m.ToFrontEnd) -> None:
        if isinstance(message, m.Output):
            self.tokens += len(message.tokens) // 4
            self.endings += [end.reason for end in message.finished]
            self.heard(message)
        elif isinstance(message, m.Refused):
            raise BenchmarkError(f"the engine refused a request: {message.message}")

    def check(self, rows: int, tokens: int) -> None:
        """Every request had all of its tokens. Raises BenchmarkError."""
        names = {FinishReason(reason).name for reason in self.endings}
        if self.tokens != rows * tokens or len(self.endings) != rows or names != {"LENGTH"}:
            raise BenchmarkError(
                f"{rows} requests of {tokens} tokens each brought {self.tokens}; {len(self.endings)} ended: {names}"
            )
        self.tokens, self.endings = 0, []

    def beat(self, now: float) -> None:
        pass

    def wake_fds(self) -> Sequence[int]:
        return ()

    def wait(self, timeout_s: float) -> None:
        pass


class HoldingDevice:
    """A device that may hold launches back until the engine waits, or enqueue them without their graphs."""

    def __init__(self, device: Device, eagerly: Callable[[LaunchShape], None] | None = None) -> None:
        self.rings = device.rings
        self.counters = device.counters
        self.buckets = device.buckets
        self.mixed_buckets = device.mixed_buckets
        self.calls_at_once = device.calls_at_once
        self._device = device
        self._eagerly = eagerly
        self._captured = True
        self._held: list[LaunchShape] | None = None

    @property
    def replays_graphs(self) -> bool:
        """Whether decode launches are graphs where possible."""
        return bool(self.buckets) and self._captured

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Decode launches are enqueued kernel by kernel. Raises BenchmarkError where there are no graphs anyway."""
        if self._eagerly is None:
            raise BenchmarkError("this device captures no graphs: it has nothing to be compared with")
        self._captured = False
        try:
            yield
        finally:
            self._captured = True

    def hold(self) -> list[LaunchShape]:
        """Keep launches back from here on until the next wait. Returns the list that they are kept in."""
        self._held = []
        return self._held

    def calls(self, shape: LaunchShape) -> int:
        return self._device.calls(shape)

    def launch(self, shape: LaunchShape) -> None:
        if self._held is not None:
            self._held.append(shape)
        elif self._captured or self._eagerly is None or not shape.is_decode:
            self._device.launch(shape)
        else:
            self._eagerly(shape)

    def sampled(self) -> int:
        return self._device.sampled()

    def ended(self) -> int:
        return self._device.ended()

    def in_tail(self) -> int:
        return self._device.in_tail()

    def wait(self, sampled: int, ended: int, wake_fds: Sequence[int], timeout_s: float, in_tail: int = NEVER) -> None:
        held, self._held = self._held, None
        for shape in held or ():
            self._device.launch(shape)
        self._device.wait(sampled, ended, wake_fds, timeout_s, in_tail)

    def read_rows(self) -> Mapping[str, NDArray[np.generic]]:
        return self._device.read_rows()

    def close(self) -> None:
        self._device.close()


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine with nothing to do. nodes: of the graph of a decode launch, None where there is none. num_blocks: the
    null block included. settings: what differs from the service's defaults, and how many blocks there are."""

    shape: Shape
    engine: Engine
    device: HoldingDevice
    front_end: FrontEnd
    model: Decoder
    num_blocks: int
    block_size: int
    nodes: Callable[[int, Form], int | None]
    settings: Settings

    @property
    def is_as_opened(self) -> bool:
        """Nothing is left of what was done with it, but for the prefix cache."""
        engine, heard = self.engine, self.front_end
        left = engine.ledger.in_flight or len(engine.registry) or engine.intake.has_more
        return not (left or heard.tokens or heard.endings) and engine.ledger.run_ahead == RUN_AHEAD

    def set_depth(self, run_ahead: int) -> None:
        """How many launches are queued ahead from here on. Raises BenchmarkError while any is in flight."""
        if self.engine.ledger.in_flight or len(self.engine.registry):
            raise BenchmarkError("the depth changes only while nothing runs")
        self.engine.ledger.run_ahead = run_ahead

    def queue_everything(self) -> None:
        """From here on a launch never waits for the tokens of the ones before; the rings have a slot for each."""
        self.engine.ledger.run_ahead = self.device.rings.layout.slots - 2


@contextlib.contextmanager
def opened(shape: Shape, settings: Mapping[str, int | float | str | bool], launches: int) -> Iterator[Bench]:
    """Load the shape's random weights, capture its graphs, and close all of it afterwards.

    settings: of the engine, where they differ from the defaults. launches: that can be staged at a time; the rings have
    a slot for each and two more. Raises ConfigError for settings that contradict each other.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what another engine had: the number of KV blocks depends on free memory
    with tempfile.TemporaryDirectory(prefix="runahead-") as name:
        folder = Path(name)
        shape.write(folder)
        config = msgspec.convert({"model": name, "run_ahead": RUN_AHEAD, **settings}, EngineConfig)
        check_config(config)
        config = msgspec.structs.replace(config, run_ahead=launches)
        checkpoint = open_checkpoint(folder)
        described = load_config(checkpoint)
        context = check_model(config, described)
        made, nodes, eagerly = _made(config, checkpoint, described, context)
        config = made.config
    held, front_end = HoldingDevice(made.device, eagerly), FrontEnd()
    scheduler = make_scheduler(
        config,
        described,
        made.blocks,
        context,
        made.draft_rows,
        draft_step=made.draft_step,
        snapshots=made.snapshots,
    )
    turn_work = config.max_rows * _REQUEST_WORK
    engine = Engine(held, scheduler, front_end, max_queue=config.max_rows, turn_work=turn_work)
    found = {
        **settings,
        "run_ahead": RUN_AHEAD,
        "block_size": config.block_size,
        "num_blocks": made.blocks,
    }
    bench = Bench(shape, engine, held, front_end, made.model, made.blocks, config.block_size, nodes, found)
    bench.set_depth(RUN_AHEAD)
    gc.collect()
    gc.freeze()  # as the engine's process does: no collection looks at the model while a step is measured
    try:
        yield bench
    finally:
        gc.unfreeze()
        held.close()


_Nodes = Callable[[int, Form], int | None]
_Launch = Callable[[LaunchShape], None]


def _made(
    config: EngineConfig, checkpoint: Checkpoint, described: ModelConfig, context: int
) -> tuple[MadeOnDevice, _Nodes, _Launch | None]:
    """The model and its device, how to count the nodes of a graph, and how to launch without one."""
    if config.device == "cpu":
        return (
            make_on_cpu(config, checkpoint, described, context, _no_progress, _no_progress),
            lambda rows, form: None,
            None,
        )
    from runahead.cuda_graphs.cuda_device import CudaDevice
    from runahead.runtime.process.cuda import make_on_cuda
    from runahead.runtime.ranks.ranked_device import RankedDevice

    made = make_on_cuda(config, checkpoint, described, context, _no_progress, _no_progress)
    device = made.device
    if isinstance(device, RankedDevice):
        own = device._own
        assert isinstance(own, CudaDevice)

        def as_captured(shape: LaunchShape) -> None:
            """Other ranks replay this launch's graph, so rank 0 runs the captured shape, with the same exchanges."""
            key = own.graph_buckets.launch_key(shape)
            if key is None:
                launch(shape)
            else:
                own.launch_eagerly(key.shape._replace(number=shape.number))

        launch = own.launch
        return made, lambda rows, form: None, mock.patch.object(own, "launch", as_captured)(device.launch)
    assert isinstance(device, CudaDevice)
    return made, lambda rows, form: device.graphs.nodes(device.launch_key(rows, form)), device.launch_eagerly


def _no_progress(done: int, total: int) -> None:
    pass
