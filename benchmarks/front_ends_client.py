"""The client of `benchmarks.front_ends`: opens streams, reads their bytes, and counts what was in them afterwards."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import Counter, defaultdict
from typing import Final

from runahead.v1 import GenerateRequest, GenerateResponse, StatsRequest, StatsResponse, StoppingOptions, TokenIds
from tests.service.raw_http2 import ACK, DATA, END_STREAM, HEADERS, MAX_WINDOW, SETTINGS, RawClient

_PATIENCE_S: Final = 30.0


class Connection:
    """A connection to one of the front ends, whose number it knows."""

    def __init__(self, port: int) -> None:
        self.client = RawClient(port, window=MAX_WINDOW)  # nothing waits for this client
        self.client.grant(0, MAX_WINDOW - 65_535)
        self.client.send(SETTINGS, flags=ACK)
        stream = self.client.begin("Stats")
        self.client.message(stream, StatsRequest().SerializeToString(), ends=True)
        (answer,) = self.client.messages_of(stream, 1)
        self.front_end = StatsResponse.FromString(answer).stats.front_end.answered_by
        self.ended = 0  # streams
        self._data = bytearray()
        self._place = 0  # of the first frame that is not whole
        self._frames: list[tuple[int, int, int]] = []  # of data: stream, where its payload begins and ends

    def open(self, streams: int, tokens: int) -> None:
        """Opens completions, and returns when all are accepted."""
        request = GenerateRequest(
            token_ids=TokenIds(ids=[1]), stopping=StoppingOptions(max_tokens=tokens, ignore_eos=True)
        ).SerializeToString()
        for _ in range(streams):
            self.client.message(self.client.begin("Generate"), request, ends=True)
        for _ in range(streams):
            self.client.frames_until(DATA)

    def feed(self, data: bytes) -> None:
        """More of what the front end has said."""
        self._data += data
        while self._place + 9 <= len(self._data):
            begin = self._place + 9
            end = begin + int.from_bytes(self._data[self._place : self._place + 3])
            if end > len(self._data):
                return
            kind, flags = self._data[self._place + 3 : self._place + 5]
            if kind == DATA:
                self._frames.append((int.from_bytes(self._data[self._place + 5 : begin]), begin, end))
            elif kind == HEADERS and flags & END_STREAM:
                self.ended += 1
            self._place = end

    def counted(self) -> tuple[int, Counter[int]]:
        """Deltas, and tokens of each stream."""
        payloads: dict[int, bytearray] = defaultdict(bytearray)
        for stream, begin, end in self._frames:
            payloads[stream] += self._data[begin:end]
        messages, tokens = 0, Counter[int]()
        for stream, payload in payloads.items():
            place = 0
            while place < len(payload):
                end = place + 5 + int.from_bytes(payload[place + 1 : place + 5])
                event = GenerateResponse.FromString(bytes(payload[place + 5 : end]))
                tokens[stream] += len(event.delta.tokens)
                messages += event.HasField("delta")
                place = end
        return messages, tokens


def connected(port: int, count: int, front_ends: int) -> list[Connection]:
    """So many connections, shared out evenly: the kernel deals them at random, and what is too much is left."""
    kept: list[Connection] = []
    while len(kept) < count:
        connection = Connection(port)
        if sum(connection.front_end == other.front_end for other in kept) < count // front_ends:
            kept.append(connection)
        else:
            connection.client.close()
    return kept


def read_all(connections: list[Connection], streams: int) -> float:
    """Reads until every stream has ended. Returns when that was, in seconds of the monotonic clock."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.client.detach(connection.feed), selectors.EVENT_READ, connection)
        while sum(connection.ended for connection in connections) < streams:
            ready = selector.select(_PATIENCE_S)
            if not ready:
                sys.exit(f"nothing came for {_PATIENCE_S:.0f} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 18)
                if not data:
                    sys.exit("a front end has closed a connection")
                key.data.feed(data)
    return time.monotonic()


def main(port: int, channels: int, streams: int, tokens: int, front_ends: int) -> None:
    """Says `ready` when the streams are open, and what was in them when they have ended."""
    connections = connected(port, channels, front_ends)
    for connection in connections:
        connection.open(streams // channels, tokens)
    print("ready", flush=True)
    ended = read_all(connections, streams)
    counted = [connection.counted() for connection in connections]
    for _, found in counted:
        if len(found) != streams // channels or set(found.values()) != {tokens}:
            sys.exit(f"streams have brought {sorted(found.values())} tokens, and should have brought {tokens} each")
    messages = sum(messages for messages, _ in counted)
    print(json.dumps({"ended": ended, "tokens": streams * tokens, "messages": messages}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
