"""An engine that computes nothing: it speaks the real protocol, and gives every request a token a launch."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from runahead.runtime.wire import messages as m
from runahead.runtime.wire.frames import FrameReader
from runahead.runtime.wire.parameters import FinishReason
from tests.service.fake_engine import STATS

INFO: Final = m.EngineInfo("null", "none", 4096, 1 << 20, (0,), -1, 1024, 1024, 2, 16, 1, "null", "none", 0)
TOKENS: Final = (72, 101, 108, 111)  # in turn


class NullEngine:
    """Takes any number of front ends, accepts whatever they submit, and says nothing more until it is told to run."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._links: list[_Link] = []
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self, launches: int, pace_s: float) -> None:
        """Gives every request so many tokens, and its end with the last one. pace_s: from launch to launch; 0 is as
        fast as the front ends read."""
        links = [link for link in self._links if link.handles]
        senders = [threading.Thread(target=link.run, args=(launches, pace_s)) for link in links]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    def close(self) -> None:
        """Gone without a word."""
        self._closed.set()
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._links.append(_Link(self._listener.accept()[0]))

    def _beat(self) -> None:
        while not self._closed.wait(m.HEARTBEAT_S):
            for link in self._links:
                link.send(m.encode_frame(m.Heartbeat()))


class _Link:
    """One front end's connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.handles: list[int] = []
        self._socket = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, frame: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # the front end has gone
            self._socket.sendall(frame)

    def run(self, launches: int, pace_s: float) -> None:
        handles = list(self.handles)
        frames = [self._frame(handles, token) for token in TOKENS]
        begun = time.monotonic()
        for launch in range(launches - 1):
            self.send(frames[launch % len(frames)])
            if (early := begun + (launch + 1) * pace_s - time.monotonic()) > 0:
                time.sleep(early)
        ends = tuple(m.Finished(handle, int(FinishReason.LENGTH), -1, 0, 0.0, 0.0, 0.0, 0.0) for handle in handles)
        self.send(self._frame(handles, TOKENS[0], ends))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _frame(self, handles: Sequence[int], token: int, ends: tuple[m.Finished, ...] = ()) -> bytes:
        ids = np.full(len(handles), token, "<i4")
        return m.encode_frame(m.Output(1, np.array(handles, "<i8").tobytes(), ids.tobytes(), (), ends))

    def _read(self) -> None:
        reader = FrameReader()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                for body in reader.feed(data):
                    self._answer(m.decode_to_engine(body))

    def _answer(self, message: m.ToEngine) -> None:
        match message:
            case m.Hello():
                self.send(m.encode_frame(m.Welcome(m.PROTOCOL_VERSION, "null", INFO)))
            case m.Submit(handle=handle):
                self.handles.append(handle)
                self.send(m.encode_frame(m.Accepted(handle)))
            case m.StatsQuery(call=call):
                self.send(m.encode_frame(m.StatsReply(call, STATS)))
