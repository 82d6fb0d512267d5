"""A whole engine behind a real socket, with a front end that behaves and one that does not."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from runahead.runtime.engine.links import SocketLinks
from runahead.runtime.engine.loop import Engine
from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.parameters import SamplingParams, StoppingParams
from runahead.runtime.wire.prompts import prepared_submit
from tests.runtime.chain import make_chain
from tests.runtime.programs.hash_model import EOS, VOCAB, completion

BLOCK = 8
CONTEXT = 128
INFO = m.EngineInfo(
    "m", "a", VOCAB, CONTEXT, (EOS,), -1, 8, 100, 65, BLOCK, 2, "cpu", "float32", 5, penalty_slots=2, prefix_cache=True
)
PROMPT = list(range(3, 23))
_names = count()


class FrontEnd:
    """One connection, and what was heard on it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.setblocking(False)
        self.heard: list[m.ToFrontEnd] = []
        self.lost = False
        self._reader = FrameReader()
        self.say(m.Hello(m.PROTOCOL_VERSION))

    def say(self, message: m.ToEngine) -> None:
        self.say_body(m.encode_frame(message)[4:])

    def say_body(self, body: bytes) -> None:
        frame = len(body).to_bytes(4, "little") + body
        assert self.socket.send(frame) == len(frame)

    def hear(self) -> None:
        while not self.lost and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:  # it was closed while it still said something
                data = b""
            self.lost = not data
            self.heard += [m.decode_to_front_end(body) for body in self._reader.feed(data)]

    @property
    def has_finished(self) -> bool:
        return any(isinstance(said, m.Output) and said.finished for said in self.heard)

    @property
    def tokens(self) -> list[int]:
        outputs = [said for said in self.heard if isinstance(said, m.Output)]
        return [token for output in outputs for token in np.frombuffer(output.tokens, np.int32).tolist()]


class BusyLinks(SocketLinks):
    """Never waits for an arrival: what a test has sent is there."""

    def wait(self, timeout_s: float) -> None:
        super().wait(0.0)


class Wire:
    """A whole engine behind a real socket, and two front ends: one that behaves, and one to misbehave."""

    def __init__(self, folder: Path) -> None:
        self.reasons: list[str] = []
        chain = make_chain(2, penalty_slots=2, block_size=BLOCK, context_length=CONTEXT)
        self.links = BusyLinks(
            folder / "engine",
            m.Welcome(m.PROTOCOL_VERSION, "server", INFO),
            lambda owner, reason: self.reasons.append(reason),
        )
        self.engine = Engine(chain.device, chain.engine.scheduler, self.links, max_queue=100)
        self.bystander, self.hostile = FrontEnd(folder / "engine"), FrontEnd(folder / "engine")
        self.bystander.say(submit(1))

    def turn_until(self, reached: Callable[[], object]) -> None:
        for _ in range(2000):
            if reached():
                return
            self.engine.turn()
            self.bystander.hear()
            self.hostile.hear()
        raise AssertionError("not reached after 2000 turns")

    def check_bystander(self) -> None:
        """It goes on to its end, with the tokens that are its own."""
        self.turn_until(lambda: self.bystander.has_finished)
        assert self.bystander.tokens == completion(PROMPT, 0, 30, stops=())
        assert not self.bystander.lost

    def check_hostile_is_gone(self) -> None:
        self.turn_until(lambda: self.hostile.lost)
        self.turn_until(lambda: self.engine.stats().front_ends_lost)
        assert self.engine.stats().front_ends_lost == 1

    def close(self) -> None:
        self.bystander.socket.close()
        self.hostile.socket.close()
        self.links.close()


def submit(handle: int, sampling: SamplingParams | None = None, **stopping: Any) -> m.Submit:
    limits = StoppingParams(**{"max_tokens": 30, "ignore_eos": True, **stopping})
    drawn = sampling or SamplingParams()
    return prepared_submit(handle, f"r{next(_names)}", np.array(PROMPT, np.int32), drawn, limits, block_size=BLOCK)
