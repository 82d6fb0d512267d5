"""A fuzzer on the port: conversations of real clients, with bytes changed, lost, doubled and moved.

Whatever comes costs its own connection at most. A bystander's calls all end well, with the right tokens, and what the
front end holds comes back.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from typing import Final

import grpc
import pytest

from runahead.service.processes.children import FRONT_END_MODULE
from runahead.v1 import (
    AbortRequest,
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateOnceRequest,
    GenerateRequest,
    GenerationServiceStub,
    OutputOptions,
    RenderChatRequest,
    SamplingOptions,
    StatsRequest,
    StoppingOptions,
    TokenizeRequest,
)
from tests.service.fake_engine import TIMEOUT_S
from tests.service.hostile.attacked import Attacked
from tests.service.hostile.test_attacks import GROWTH_MIB
from tests.service.raw_http2 import ACK, PING, RST_STREAM, SETTINGS, RawClient
from tests.service.service_processes import running

CONVERSATIONS: Final = 60  # of each seed
_SHORT: Final = StoppingOptions(max_tokens=3, stop=["x", "yy"])


def conversation(random_: random.Random) -> bytes:
    """What a client says from its first byte on: some calls of all kinds, among pings, windows and resets."""
    said = bytearray()
    client = RawClient.recorded(said)
    client.send(SETTINGS, flags=ACK)
    requests: list[tuple[str, bytes]] = [
        (
            "Generate",
            GenerateRequest(
                text="def f():\n", stopping=_SHORT, sampling=SamplingOptions(temperature=0.5, logit_bias={5: 1.0})
            ).SerializeToString(),
        ),
        ("Generate", GenerateRequest(text="é漢🙂", output=OutputOptions(logprobs=2, echo=True)).SerializeToString()),
        ("GenerateOnce", GenerateOnceRequest(text="x = ", stopping=_SHORT).SerializeToString()),
        ("Tokenize", TokenizeRequest(text="some text " * 20).SerializeToString()),
        ("Detokenize", DetokenizeRequest(token_ids=list(range(50))).SerializeToString()),
        (
            "RenderChat",
            RenderChatRequest(chat=Chat(messages=[ChatMessage(role="user", content="é")])).SerializeToString(),
        ),
        ("Abort", AbortRequest(request_ids=["a", "b"]).SerializeToString()),
        ("Stats", StatsRequest().SerializeToString()),
    ]
    for _ in range(random_.randint(1, 6)):
        method, request = random_.choice(requests)
        stream = client.begin(method, {"grpc-timeout": "5S", "x-request-id": "fuzz"})
        cut = random_.randint(0, len(request))
        client.message(stream, request[:cut], ends=False, says=len(request))
        client.data(stream, request[cut:], ends=True)
        match random_.randint(0, 5):
            case 0:
                client.send(PING, b"12345678")
            case 1:
                client.grant(0, random_.randint(1, 1 << 20))
            case 2:
                client.send(RST_STREAM, struct.pack(">I", 8), stream=stream)
    return bytes(said)


def _flip(data: bytearray, random_: random.Random) -> None:
    data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)


def _drop(data: bytearray, random_: random.Random) -> None:
    begin = random_.randrange(len(data))
    del data[begin : begin + random_.randint(1, 30)]


def _double(data: bytearray, random_: random.Random) -> None:
    begin = random_.randrange(len(data))
    data[begin:begin] = data[begin : begin + random_.randint(1, 200)]


def _insert(data: bytearray, random_: random.Random) -> None:
    begin = random_.randrange(len(data))
    data[begin:begin] = random_.randbytes(random_.randint(1, 40))


def _extreme(data: bytearray, random_: random.Random) -> None:
    """A number that something may take for a length."""
    begin = random_.randrange(len(data))
    data[begin : begin + 4] = random_.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0"])


def _cut(data: bytearray, random_: random.Random) -> None:
    del data[random_.randrange(len(data)) :]


_MUTATIONS: Final[tuple[Callable[[bytearray, random.Random], None], ...]] = (
    *[_flip] * 4,
    _drop,
    _double,
    _insert,
    _extreme,
    _cut,
)


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Changed in one to six places; most of them behind the preface, without which nothing is read at all."""
    preface = 0 if random_.random() < 0.05 else 24
    head, changed = data[:preface], bytearray(data[preface:])
    for _ in range(random_.randint(1, 6)):
        if changed:
            random_.choice(_MUTATIONS)(changed, random_)
    return head + bytes(changed)


def speak(port: int, data: bytes, random_: random.Random) -> int:
    """Says it, in pieces of any size, and hears whatever comes until both are silent. Returns the bytes heard."""
    heard = 0
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as connection:
        try:
            while data:
                size = random_.choice([1, 9, 100, 5_000])
                connection.sendall(data[:size])
                data = data[size:]
            if random_.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                heard += len(piece)
        except OSError:  # it was thrown out, or nothing more comes
            pass
    return heard


def test_a_conversation_that_is_not_changed_is_answered(attacked: Attacked) -> None:
    """What is changed is a conversation, and not noise: the recorded bytes get the response that a gRPC client gets."""
    request = TokenizeRequest(text="abc def")
    with grpc.insecure_channel(f"127.0.0.1:{attacked.port}") as channel:
        expected = GenerationServiceStub(channel).Tokenize(request, timeout=TIMEOUT_S)
    said = bytearray()
    client = RawClient.recorded(said)
    client.message(client.begin("Tokenize"), request.SerializeToString(), ends=True)
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(said)
        heard = b""
        while b"grpc-status" not in heard:
            heard += connection.recv(1 << 16)
    message = expected.SerializeToString()
    assert len(expected.token_ids) > 1
    assert b"\0" + struct.pack(">I", len(message)) + message in heard


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_cost_nobody_else_anything(attacked: Attacked, seed: int) -> None:
    descriptors, resident_mib = attacked.descriptors, attacked.resident_mib
    random_ = random.Random(seed)
    heard = 0
    for number in range(CONVERSATIONS):
        heard += speak(attacked.port, mutated(conversation(random_), random_), random_) > 0
        if number % 10 == 9:
            attacked.bystander.first_tokens_s(1)
    assert heard > CONVERSATIONS / 2, "most of it was read"
    attacked.wait_for_descriptors(descriptors)
    assert running(attacked.service, FRONT_END_MODULE) == [attacked.front_end], "it lives, and was never another"
    assert attacked.resident_mib - resident_mib < GROWTH_MIB
