"""A tokenizer whose regular expressions may take any time: processes of its own use it, within a bound for each text.

A thread can't be ended while the library looks for a match. A process can be.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runahead.runtime.process_end import described
from runahead.service.contract.errors import ServiceError, Violation, exhausted, invalid_argument
from runahead.service.text.tokenizer_process import PROCESSOR_S, Answer, Ask

COMMAND: Final = (sys.executable, "-P", "-m", "runahead.service.text.tokenizer_process")


class BoundedTokenizer:
    """Used on several threads, which live as long as it does: each has a process at most. description: of the
    tokenizer, as `tokenizer.json` has it."""

    def __init__(self, description: str, command: Sequence[str] = COMMAND) -> None:
        self._description = msgspec.json.encode(description) + b"\n"
        self._command = command
        self._running = set[subprocess.Popen[bytes]]()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def encode(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        """int32 [n]. Raises ServiceError for a text that takes too long."""
        return np.asarray(self._answer(Ask(text, (), add_special_tokens), "text").ids, np.int32)

    def decode(self, ids: Sequence[int], include_special_tokens: bool) -> str:
        """Raises ServiceError for ids that take too long."""
        return self._answer(Ask(None, tuple(ids), include_special_tokens), "token_ids").text

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()
            idle, self._idle = self._idle, []
        for process in idle:  # the others are waited for by whoever has asked them
            self._end(process)

    def _answer(self, ask: Ask, field: str) -> Answer:
        process = self._idle_one() or self._started()
        assert process.stdin is not None and process.stdout is not None
        answer = None
        with suppress(OSError, ValueError):  # it has ended: what it said, if anything, is no whole line
            process.stdin.write(msgspec.json.encode(ask) + b"\n")
            process.stdin.flush()
            answer = msgspec.json.decode(process.stdout.readline(), type=Answer)
        if answer is None:
            code = self._end(process)
            if code == -signal.SIGPROF:
                sentence = f"{field} takes more than {PROCESSOR_S:g} s of processor time to be tokenized"
                raise invalid_argument([Violation(field, sentence)])
            raise RuntimeError(f"a process that tokenizes has ended with {described(code)}")
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._idle.append(process)
        if is_closed:
            self._end(process)
        if answer.failed:
            raise RuntimeError("the tokenizer's library has failed")
        return answer

    def _idle_one(self) -> subprocess.Popen[bytes] | None:
        """One that still runs."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or process.poll() is None:
                return process
            self._end(process)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the tokenizer is closed")
            try:
                process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise _no_process(error) from None
            self._running.add(process)
        assert process.stdin is not None
        with suppress(OSError):  # it has ended: whoever asks it finds that out
            process.stdin.write(self._description)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code


def _no_process(error: OSError) -> ServiceError:
    return exhausted("TOKENIZING_LIMIT", f"no process can be started that tokenizes: {error.strerror}", 1.0)
