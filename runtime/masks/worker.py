"""The mask worker's process: `python -m runahead.runtime.masks.worker SOCKET MEMORY`, started by the engine.

SOCKET and MEMORY are inherited descriptors: one end of a socket pair, and the masks' memory. The first order names the
tokenizer. It ends when the engine closes the socket. It logs nothing of its orders: grammars and tokens belong to
callers.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from runahead.runtime.checkpoint import CheckpointError, open_checkpoint
from runahead.runtime.drafters.ngram import NgramDrafter
from runahead.runtime.grammar.matcher import VocabularyError, load_vocabulary, new_matcher
from runahead.runtime.masks import worker_messages
from runahead.runtime.masks.grammar_rows import GrammarRows, Matcher
from runahead.runtime.masks.mask_memory import ASKED, COMPILED, HANDLED, MaskMemory
from runahead.runtime.process_end import signal_at_parents_death
from runahead.runtime.wire.frames import FrameReader

EXIT_CANNOT_START: Final = 2
_READ_BYTES: Final = 1 << 16


class Compiler:
    """Compiles grammars on a separate thread so that other rows get their masks meanwhile: the library releases the
    GIL. `done` becomes readable when there is a result.
    """

    def __init__(self, vocabulary: object) -> None:
        self._vocabulary = vocabulary
        self._pool = ThreadPoolExecutor(1, "compile")
        self._results: deque[tuple[str, Matcher | None, int]] = deque()
        self.done, self._tell = socket.socketpair()
        self.done.setblocking(False)

    def soon(self, grammar: str) -> None:
        """Queue this grammar for compilation."""
        self._pool.submit(self._compile, grammar)

    def collect(self, rows: GrammarRows) -> None:
        """Pass compiled grammars on."""
        self.done.recv(_READ_BYTES)
        while self._results:
            rows.compiled(*self._results.popleft())

    def _compile(self, grammar: str) -> None:
        begun = time.monotonic_ns()
        try:
            matcher: Matcher | None = new_matcher(self._vocabulary, grammar)
        except BaseException:  # also panics, which derive from BaseException; requests would otherwise wait forever
            matcher = None
        self._results.append((grammar, matcher, time.monotonic_ns() - begun))
        self._tell.send(b"\0")


def main() -> int:
    """Handle orders until the socket ends. Returns the exit code."""
    signal_at_parents_death()
    for number in (signal.SIGINT, signal.SIGTERM):  # also those sent to the process group: the engine handles them
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    reader = FrameReader()
    begin = _first(sock, reader)
    if begin is None:
        return 0
    memory = MaskMemory(begin.max_rows, begin.vocab_size, begin.drafts, int(sys.argv[2]))
    memory.figures[ASKED] = memory.figures[COMPILED]  # an earlier worker may have left some
    try:
        text = open_checkpoint(Path(begin.model)).tokenizer()
        vocabulary = load_vocabulary(text, begin.vocab_size, begin.eos_token_ids)
    except (CheckpointError, VocabularyError) as error:
        sock.sendall(worker_messages.frame(worker_messages.Says(f"it can't start: {error}")))
        return EXIT_CANNOT_START
    compiler = Compiler(vocabulary)
    drafter = NgramDrafter(begin.max_rows, begin.context_length) if begin.context_length else None
    _serve(sock, reader, memory, compiler, GrammarRows(memory, begin.vocab_size, compiler.soon, drafter))
    return 0


def _first(sock: socket.socket, reader: FrameReader) -> worker_messages.Begin | None:
    """Return the first order; None if the socket ends."""
    while (body := reader.take()) is None:
        data = sock.recv(_READ_BYTES)
        if not data:
            return None
        reader.add(data)
    message = worker_messages.read_order(body)
    assert isinstance(message, worker_messages.Begin)
    return message


def _serve(sock: socket.socket, reader: FrameReader, memory: MaskMemory, compiler: Compiler, rows: GrammarRows) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(compiler.done, selectors.EVENT_READ)
        while True:
            while (body := reader.take()) is not None:
                _carry_out(worker_messages.read_order(body), rows)
                memory.figures[HANDLED] += 1
            for lost in rows.lost:
                sock.sendall(worker_messages.frame(lost))
            rows.lost.clear()
            for key, _ in selector.select():
                if key.fileobj is compiler.done:
                    compiler.collect(rows)
                elif data := sock.recv(_READ_BYTES):
                    reader.add(data)
                else:
                    return


def _carry_out(message: worker_messages.Order, rows: GrammarRows) -> None:
    match message:
        case worker_messages.Open():
            rows.open(message.order, message.grammar, message.stops)
        case worker_messages.Place():
            tokens = np.frombuffer(message.tokens, np.int32)
            rows.place(message.order, message.slot, message.epoch, message.position, tokens)
        case worker_messages.Take():
            orders_of, tokens = np.frombuffer(message.orders, np.int64), np.frombuffer(message.tokens, np.int32)
            rows.take(orders_of, tokens, message.drafts, message.guesses, soon=message.soon)
        case worker_messages.Close():
            rows.close(message.order)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConnectionError:  # the engine is gone
        sys.exit(0)
    except Exception as error:  # whose message could repeat a grammar
        print(f"the mask worker has met a {type(error).__name__} and ends", file=sys.stderr, flush=True)
        sys.exit(1)
