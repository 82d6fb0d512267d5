"""The engine on a model that several ranks have between them, in this process and one process for each other rank: on
as many GPUs, or two on the one GPU of the machine, which then switches between the processes within each exchange.

`python -m tests.gpu.engine_on_gpus` prints the JSON of `Outcome`, and its progress on standard error. Behind it, MODEL
is a name of `divided_models`, and DEVICE, `cpu`, tries it with ranks on CPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_table.engines import FrontEnd
from runahead.cuda_graphs.device import DeviceError
from runahead.runtime.checkpoint import open_checkpoint
from runahead.runtime.engine.loop import Engine
from runahead.runtime.models.read_config import load_config
from runahead.runtime.process.parts import MadeOnDevice, check_model, make_scheduler
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.gpu.divided_models import saved
from tests.gpu.exchanges_on_gpus import RANKS, gpus

CHUNK: Final = 256  # tokens of a prompt in a launch, and in hybrids from one snapshot of its state to the next
LENGTHS: Final = (5, 300, 17, 64, 700, 3)  # prompts of a chunk, of several, and of a few tokens
TOKENS: Final = 32
ENDLESS: Final = 900
DEPTHS: Final = (2, 0, 1, 4)  # launches ahead; 0: serial
DEADLINE_S: Final = 60.0


class Outcome(msgspec.Struct):
    """alone: tokens of each request by itself. together: of all of them at once, by depth, in their order and in the
    reverse one. accepted: drafts. failed: what the engine says when rank 1 is killed under load, after so many
    seconds."""

    alone: list[list[int]]
    together: dict[int, tuple[list[list[int]], list[list[int]]]]
    accepted: int = 0
    failed: str = ""
    failed_s: float = 0.0


def make(device: str, served: Mapping[str, Any], drafter: str = "none") -> MadeOnDevice:
    """The engine's parts. served: as `divided_models.saved`."""
    asked: dict[str, Any] = {
        "device": device, "dtype": "bfloat16" if device == "cuda" else "auto",
        "max_rows": 8, "num_blocks": 600, "max_prefill_tokens": 512, "prefill_chunk": CHUNK, "draft_forced": False,
        "tensor_parallel": RANKS, "context_length": 1024, "launch_timeout_s": 5.0, "run_ahead": 4,
        "drafter": drafter, **served,
    }  # fmt: skip
    config = msgspec.convert(asked, EngineConfig)
    checkpoint = open_checkpoint(Path(config.model))
    described = load_config(checkpoint)
    if device == "cpu":
        from runahead.runtime.process.cpu import make_on_cpu as make_on
    else:
        from runahead.runtime.process.cuda import make_on_cuda

        make_on = partial(make_on_cuda, gpus=gpus())
    return make_on(config, checkpoint, described, check_model(config, described), _no_progress, _no_progress)


def _no_progress(done: int, total: int) -> None:
    pass


def _tell(what: str) -> None:
    print(f"{time.monotonic():.1f} s: {what}", file=sys.stderr, flush=True)


def prompt(place: int) -> NDArray[np.int32]:
    return np.array([(37 * place + 11 * i) % 4000 + 2 for i in range(LENGTHS[place])], np.int32)


def sampling(place: int) -> SamplingParams:
    """Some are greedy, others drawn, some with penalties."""
    return SamplingParams(
        temperature=0.8 * (place % 2), top_p=0.9, seed=place, repetition_penalty=1.1 if place % 3 == 2 else 1.0
    )


class Served:
    """An engine that is asked for completions. heard: tokens by handle."""

    def __init__(self, made: MadeOnDevice) -> None:
        config, self.block_size = made.config, made.config.block_size
        context = check_model(config, made.model.config)
        scheduler = make_scheduler(
            config, made.model.config, made.blocks, context, made.draft_rows, snapshots=made.snapshots
        )
        self.front_end, self.heard = FrontEnd(), dict[int, list[int]]()
        self.front_end.heard = self._hear
        self.engine = Engine(made.device, scheduler, self.front_end, max_queue=64, turn_work=64)
        self._handles = count(1)

    def _hear(self, output: m.Output) -> None:
        tokens = np.frombuffer(output.tokens, np.int32).tolist()
        for handle, token in zip(np.frombuffer(output.handles, np.int64).tolist(), tokens, strict=True):
            self.heard.setdefault(handle, []).append(token)

    def ask(self, place: int, tokens: int = TOKENS) -> int:
        """Returns the handle."""
        handle = next(self._handles)
        stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        self.front_end.inbox.append(
            prepared_submit(handle, f"r{handle}", prompt(place), sampling(place), stopping, block_size=self.block_size)
        )
        return handle

    def turn_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, "the engine makes no progress"
            self.engine.turn()

    def run(self, places: Sequence[int]) -> list[list[int]]:
        handles = [self.ask(place) for place in places]
        self.turn_until(lambda: all(len(self.heard.get(handle, ())) == TOKENS for handle in handles))
        self.turn_until(lambda: not self.engine.ledger.in_flight and not len(self.engine.registry))
        return [self.heard[handle] for handle in handles]


def outcome(device: str, name: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        made = make(device, saved(name, Path(folder)))
    _tell("the engine is made")
    served = Served(made)
    places = range(len(LENGTHS))
    served.engine.ledger.run_ahead = DEPTHS[0]
    found = Outcome([served.run([place])[0] for place in places], {})
    _tell("each request has been alone")
    for depth in DEPTHS:
        served.engine.ledger.run_ahead = depth
        found.together[depth] = served.run(places), served.run(places[::-1])[::-1]
        _tell(f"all have been together, {depth} launches ahead")
    found.accepted = sum(served.engine.stats().accepted.values())
    handles = [served.ask(place, ENDLESS) for place in (0, 2, 5)]
    served.turn_until(lambda: all(len(served.heard.get(handle, ())) > TOKENS // 2 for handle in handles))
    os.kill(made.device._followers.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
    begun = time.monotonic()
    try:
        served.turn_until(lambda: False)
    except DeviceError as error:
        found.failed, found.failed_s = str(error), time.monotonic() - begun
    return found


if __name__ == "__main__":
    named, on = (*sys.argv[1:], *("dense", "cuda")[len(sys.argv) - 1 :])
    print(msgspec.json.encode(outcome(on, named)).decode(), flush=True)
    os._exit(0)  # as the engine's process ends after a fault: nothing waits for the device
