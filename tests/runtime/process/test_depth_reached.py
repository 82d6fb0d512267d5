"""The depth that an engine is asked for is the depth that its launches have, from the configuration on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from runahead.cuda_graphs.device import LaunchShape, Program
from runahead.cuda_graphs.host_device import HostDevice
from runahead.runtime import models
from runahead.runtime.engine.loop import Engine
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import FinishReason, SamplingParams, StoppingParams
from tests.runtime.assembled import assembled
from tests.runtime.chain import MemoryLinks

BUNDLED = Path(models.__path__[0]) / "bundled"
PROMPT = [10, 11, 12]
DEPTHS = [0, 1, 2, 3, 4]


class Gate:
    """A program whose first launches wait, each until so many are queued, itself included. 0: none waits."""

    def __init__(self, device: HostDevice, queued: int) -> None:
        self._program: Program = device._program
        self._queued = queued
        self._launched = 0
        self._moved = threading.Condition()
        self._launch = device.launch
        device._program = self
        device.launch = self._note  # type: ignore[method-assign]

    def open(self) -> None:
        with self._moved:
            self._queued = 0
            self._moved.notify_all()

    def _note(self, shape: LaunchShape) -> None:
        self._launch(shape)
        with self._moved:
            self._launched = shape.number
            self._moved.notify_all()

    def sample(self, shape: LaunchShape) -> None:
        with self._moved:
            there = partial(lambda number: number > 2 or self._launched >= number + self._queued - 1, shape.number)
            assert self._moved.wait_for(there, 10), f"launch {shape.number} waits for {self._queued} launches"
        self._program.sample(shape)

    def apply(self, shape: LaunchShape) -> int:
        return self._program.apply(shape)

    def forward(self, shape: LaunchShape) -> None:
        self._program.forward(shape)

    def read_rows(self) -> Mapping[str, np.ndarray]:
        return self._program.read_rows()


@contextmanager
def gated_engine(run_ahead: int, queued: int = 0) -> Iterator[tuple[Engine, MemoryLinks]]:
    """An engine over the bundled model as its configuration makes it. queued: of the gate."""
    threads = torch.get_num_threads()
    config = EngineConfig(
        model=str(BUNDLED), run_ahead=run_ahead, max_rows=4, num_blocks=40, context_length=256, device="cpu", threads=1
    )
    parts = assembled(config)
    assert isinstance(parts.device, HostDevice)
    gate, links = Gate(parts.device, queued), MemoryLinks()
    engine = Engine(parts.device, parts.scheduler, links, max_queue=4, run_ahead_asked=config.run_ahead)
    try:
        yield engine, links
    finally:
        gate.open()
        parts.device.close()
        torch.set_num_threads(threads)


def submit(links: MemoryLinks, **stopping: object) -> None:
    prompt = np.array(PROMPT, np.int32).tobytes()
    links.tell(1, m.Submit(1, "r1", prompt, SamplingParams(temperature=0.0), StoppingParams(**stopping)))  # type: ignore[arg-type]


def run(engine: Engine) -> None:
    """Turn until nothing is left to do."""
    engine.turn()
    while len(engine.registry) or engine.ledger.in_flight or engine.ledger.owes_a_launch:
        engine.turn()


def first_token() -> int:
    """What the model says first."""
    with gated_engine(0) as (engine, links):
        submit(links, max_tokens=1)
        run(engine)
        (output,) = [sent for _, sent in links.sent if isinstance(sent, m.Output)]
        return int(np.frombuffer(output.tokens, np.int32)[0])


@pytest.mark.parametrize("depth", DEPTHS)
def test_so_many_launches_are_queued_behind_a_device_that_stands_still(depth: int) -> None:
    with gated_engine(depth, queued=100) as (engine, links):
        submit(links, max_tokens=50, ignore_eos=True)
        engine.turn()
        stats = engine.stats()
        assert engine.device.sampled() == 0, "the device stands still"
        assert stats.launches == max(1, depth)
        assert stats.launches_by_depth == dict.fromkeys(range(1, max(1, depth) + 1), 1)
        assert (stats.run_ahead, stats.ledger_depth_max) == (depth, max(1, depth)), "asked and reached"


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_that_nobody_could_foresee_wastes_a_row_in_as_many_launches_as_were_queued(depth: int) -> None:
    """What would differ if the depth were not reached: the rows of a request whose end the host has yet to see."""
    stop = first_token()
    with gated_engine(depth, queued=max(1, depth)) as (engine, links):
        submit(links, max_tokens=50, ignore_eos=True, stop_token_ids=(stop,))
        run(engine)
        ends = [end for _, sent in links.sent if isinstance(sent, m.Output) for end in sent.finished]
        assert [end.reason for end in ends] == [FinishReason.STOP]
        assert engine.stats().void_rows == max(1, depth)


def test_what_was_asked_for_is_shown_beside_what_a_shallower_chain_reached() -> None:
    with gated_engine(1) as (engine, links):
        deeper = Engine(engine.device, engine.scheduler, links, max_queue=4, run_ahead_asked=4)
        submit(links, max_tokens=20, ignore_eos=True)
        run(deeper)
        stats = deeper.stats()
        assert (stats.run_ahead, stats.ledger_depth_max) == (4, 1)
