"""Whatever a front end says: at worst its connection ends, with its requests, and nobody else notices."""

from __future__ import annotations

import math
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import messages as m
from runtime.engine import Engine
from runtime.links import SocketLinks
from runtime.preparation import prepared_submit
from runtime.request import FinishReason, SamplingParams, StoppingParams
from tests.runtime.chain import make_chain
from tests.runtime.hash_model import EOS, VOCAB, completion

BLOCK = 8
CONTEXT = 128
INFO = m.EngineInfo(
    "m", "a", VOCAB, CONTEXT, (EOS,), -1, 8, 100, 65, BLOCK, 2, "cpu", "float32", 5, penalty_slots=2, prefix_cache=True
)
PROMPT = list(range(3, 23))
_NAMES = count()


class FrontEnd:
    """One connection, and what was heard on it."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.setblocking(False)
        self.heard: list[m.ToFrontEnd] = []
        self.lost = False
        self._reader = m.FrameReader()
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


class Wire:
    """A whole engine behind a real socket, and two front ends: one that behaves, and one to misbehave."""

    def __init__(self, folder: Path) -> None:
        self.reasons: list[str] = []
        chain = make_chain(2, penalty_slots=2, block_size=BLOCK, context_length=CONTEXT)
        self.links = SocketLinks(
            folder / "engine",
            lambda: m.Welcome(m.PROTOCOL_VERSION, "server", INFO),
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


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.close()


def submit(handle: int, sampling: SamplingParams | None = None, **stopping: Any) -> m.Submit:
    limits = StoppingParams(**{"max_tokens": 30, "ignore_eos": True, **stopping})
    drawn = sampling or SamplingParams()
    return prepared_submit(handle, f"r{next(_NAMES)}", np.array(PROMPT, np.int32), drawn, limits, block_size=BLOCK)


def changed(**changes: object) -> m.Submit:
    return msgspec.structs.replace(submit(1), **changes)


def drawn(**sampling: Any) -> m.Submit:
    return submit(1, SamplingParams(**sampling))


REPEATS = submit(1, SamplingParams(repetition_penalty=1.5))

MANY = np.arange(2, 60, dtype=np.int32)

BROKEN = {
    "prompt of five bytes": changed(prompt=b"12345"),
    "no prompt": changed(prompt=b"", block_keys=b""),
    "prompt id out of range": changed(prompt=np.array([*PROMPT[1:], VOCAB], np.int32).tobytes()),
    "negative prompt id": changed(prompt=np.array([*PROMPT[1:], -1], np.int32).tobytes()),
    "handle 0": changed(handle=0),
    "handle over 64 bits' half": changed(handle=1 << 63),
    "id of 16 KiB": changed(request_id="r" * (1 << 14)),
    "salt of 16 KiB": changed(cache_salt="r" * (1 << 14)),
    "33 stop ids": submit(1, stop_token_ids=tuple(range(33))),
    "32 stop ids beside the model's own": submit(1, stop_token_ids=tuple(range(2, 34)), ignore_eos=False),
    "stop id out of range": submit(1, stop_token_ids=(VOCAB,)),
    "negative stop id": submit(1, stop_token_ids=(-1,)),
    "no tokens": submit(1, max_tokens=0),
    "negative max_tokens": submit(1, max_tokens=-1),
    "max_tokens over 32 bits": submit(1, max_tokens=1 << 40),
    "min_tokens over max_tokens": submit(1, min_tokens=31),
    "top_k over 32 bits": drawn(top_k=1 << 40),
    "negative top_k": drawn(top_k=-1),
    "top_p 0": drawn(top_p=0.0),
    "top_p that is 0 in float32": drawn(top_p=1e-50),
    "min_p over 1": drawn(min_p=1.5),
    "negative temperature": drawn(temperature=-1.0),
    "repetition penalty 0": drawn(repetition_penalty=0.0),
    "top log-probabilities over the maximum": drawn(logprobs=21),
    "prompt log-probabilities over the maximum": drawn(prompt_logprobs=21),
    "4,000 biases": drawn(bias_ids=tuple(range(4000)), bias_values=(1.0,) * 4000),
    "ids without biases": drawn(bias_ids=(3,)),
    "one id twice in the biases": drawn(bias_ids=(3, 3), bias_values=(1.0, 1.0)),
    "bias id out of range": drawn(bias_ids=(VOCAB,), bias_values=(1.0,)),
    "negative bias id": drawn(bias_ids=(-1,), bias_values=(1.0,)),
    "mask of another vocabulary": drawn(allowed_mask=bytes([255] * (VOCAB // 32 * 4))),
    "mask of no words": drawn(allowed_mask=b"12345"),
    "mask beyond the vocabulary": drawn(allowed_mask=bytes([255] * (-(-VOCAB // 32) * 4))),
    "mask of nothing": drawn(allowed_mask=bytes(-(-VOCAB // 32) * 4)),
    "keys that are too few": changed(block_keys=b"k" * 32),
    "no keys": changed(block_keys=b""),
    "distinct ids for nobody": changed(prompt_ids=np.array([3], np.int32).tobytes()),
    "no distinct ids": msgspec.structs.replace(REPEATS, prompt_ids=b""),
    "more distinct ids than tokens": msgspec.structs.replace(REPEATS, prompt_ids=MANY.tobytes()),
    "distinct ids that are not": msgspec.structs.replace(REPEATS, prompt_ids=np.array([3, 3], np.int32).tobytes()),
    "distinct id out of range": msgspec.structs.replace(REPEATS, prompt_ids=np.array([VOCAB], np.int32).tobytes()),
    "negative distinct id": msgspec.structs.replace(REPEATS, prompt_ids=np.array([-1, 3], np.int32).tobytes()),
    "Hello twice": m.Hello(m.PROTOCOL_VERSION),
    "Cancel for a reason that is the engine's": m.Cancel(1, FinishReason.NON_FINITE),
} | {
    f"{name} is {value}": drawn(**{name: value})
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for value in (math.nan, math.inf)
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN)
def test_a_message_that_can_t_be_ends_its_connection_and_nothing_else(wire: Wire, message: m.ToEngine) -> None:
    wire.turn_until(lambda: wire.hostile.heard)
    wire.hostile.say(submit(1))  # it has a request that goes well, until then
    wire.turn_until(lambda: wire.hostile.tokens)
    if isinstance(message, m.Submit) and message.handle == 1:
        message = msgspec.structs.replace(message, handle=2)
    wire.hostile.say(message)
    wire.check_hostile_is_gone()
    assert wire.reasons, "and its kind is told"
    wire.check_bystander()
    stats = wire.engine.stats()
    assert stats.finished == {"LENGTH": 1, "CANCELLED": 1}, "its other request ended as one that nobody reads"
    assert (stats.running, stats.waiting) == (0, 0)


def test_one_handle_twice_ends_the_connection(wire: Wire) -> None:
    wire.hostile.say(submit(7))
    wire.hostile.say(submit(7))
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_handles_go_up(wire: Wire) -> None:
    wire.hostile.say(submit(7))
    wire.hostile.say(submit(6))
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_a_cancel_of_nobody_hurts_nobody(wire: Wire) -> None:
    wire.hostile.say(m.Cancel(1234))
    wire.hostile.say(m.StatsQuery(1))
    wire.turn_until(lambda: any(isinstance(said, m.StatsReply) for said in wire.hostile.heard))
    wire.check_bystander()
    assert not wire.hostile.lost


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x94\x05\x01" + b"\x91" * 100_000, msgspec.msgpack.encode(submit(1)).replace(b"r", b"\xff", 1)],
    ids=["nothing", "no MessagePack", "lists in lists without end", "text that is not UTF-8"],
)
def test_bytes_that_are_no_message_end_the_connection(wire: Wire, body: bytes) -> None:
    wire.hostile.say_body(body)
    wire.check_hostile_is_gone()
    wire.check_bystander()


def test_the_reason_repeats_nothing_of_the_prompt(wire: Wire) -> None:
    wire.hostile.say(changed(prompt=b"secretsecretX", request_id="whose"))
    wire.check_hostile_is_gone()
    assert "secret" not in wire.reasons[0]
    assert "whose" not in wire.reasons[0]
    assert "13 bytes" in wire.reasons[0]


# ---------------------------------------------------------------- anything at all

NUMBERS = st.sampled_from([-1, 0, 1, 2, 20, 33, VOCAB, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)])
FLOATS = st.sampled_from([-1.0, 0.0, 5e-324, 1e-50, 1e-45, 0.5, 1.0, 2.0, 1e38, 1e300, math.nan, math.inf, -math.inf])
VALUES = st.one_of(
    NUMBERS,
    FLOATS,
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.binary(max_size=12),
    st.lists(st.one_of(NUMBERS, FLOATS), max_size=40),
)
CHANGES = st.lists(st.tuples(st.integers(0, 200), VALUES), min_size=1, max_size=3)


def fuzzed(changes: list[tuple[int, object]]) -> bytes:
    """A Submit in which some fields, of its own or of what it holds, are something else."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(submit(2)))
    places = [(fields, i) for i in range(len(fields))]
    places += [(inner, i) for inner in fields if isinstance(inner, list) for i in range(len(inner))]
    for place, value in changes:
        held, i = places[place % len(places)]
        held[i] = value
    return msgspec.msgpack.encode(fields)


@settings(max_examples=150, deadline=None)
@given(bodies=st.lists(st.one_of(CHANGES.map(fuzzed), st.binary(max_size=60)), min_size=1, max_size=4))
def test_whatever_is_said_the_engine_goes_on_and_a_bystander_has_its_tokens(bodies: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(Path(folder))
        for body in bodies:
            if wire.hostile.lost:
                break
            wire.hostile.say_body(body)
            for _ in range(3):
                wire.engine.turn()
                wire.bystander.hear()
                wire.hostile.hear()
        wire.check_bystander()
        wire.turn_until(lambda: not wire.engine.ledger.in_flight and not len(wire.engine.registry))
        assert wire.engine.stats().front_ends_lost == wire.hostile.lost == bool(wire.reasons)
        wire.close()
