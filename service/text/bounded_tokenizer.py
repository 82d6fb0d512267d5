"""A tokenizer with unknown regular expressions, run in processes with a time limit for each text.

A thread can't be ended while the library searches for a match; a process can. Its caller waits a bounded time, since
the process may be stopped or wait for a processor.
"""

from __future__ import annotations

import errno
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
from runahead.service.text.tokenizer_process import MEMORY_BYTES, PROCESSOR_S, Answer, Ask

COMMAND: Final = (sys.executable, "-P", "-m", "runahead.service.text.tokenizer_process")
WALL_S: Final = 20 * PROCESSOR_S  # for an answer on a busy machine
_CHECKS: Final = 8  # checks while a thread waits: a stop of the whole machine counts as one


class BoundedTokenizer:
    """Used on several threads, each with at most one process. description: the text of `tokenizer.json`."""

    def __init__(self, description: str, command: Sequence[str] = COMMAND) -> None:
        self._description = msgspec.json.encode(description) + b"\n"
        self._command = command
        self._wall_s = WALL_S  # seconds for an answer
        self._running = set[subprocess.Popen[bytes]]()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def encode(self, text: str, add_special_tokens: bool) -> NDArray[np.int32]:
        """Tokenize to int32 [n]. Raises ServiceError for a text that takes too long."""
        return np.asarray(self._answer(Ask(text, (), add_special_tokens), "text").ids, np.int32)

    def decode(self, ids: Sequence[int], include_special_tokens: bool) -> str:
        """Detokenize. Raises ServiceError for ids that take too long."""
        return self._answer(Ask(None, tuple(ids), include_special_tokens), "token_ids").text

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()
            idle, self._idle = self._idle, []
        for process in idle:  # callers of the others wait for their ends
            self._end(process)

    def _answer(self, ask: Ask, field: str) -> Answer:
        process, said = self._idle_one(), msgspec.json.encode(ask) + b"\n"
        if process is None:
            process, said = self._started(), self._description + said
        answer = None
        try:
            answer = msgspec.json.decode(_exchanged(process, said, self._wall_s), type=Answer)
        except TimeoutError:
            self._end(process)
            sentence = f"a process that tokenizes did not answer within {self._wall_s:g} s"
            raise exhausted("TOKENIZING_LIMIT", sentence, 1.0) from None
        except (OSError, ValueError) as error:  # it has ended, possibly within a line
            if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                self._end(process)
                raise _no_process(error) from None
        if answer is None:
            code = self._end(process)
            if code == -signal.SIGPROF:
                sentence = f"{field} takes more than {PROCESSOR_S:g} s of processor time to be tokenized"
                raise invalid_argument([Violation(field, sentence)])
            if code == -signal.SIGABRT:
                sentence = f"{field} takes more than {MEMORY_BYTES >> 20} MiB of memory to be tokenized"
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
        """Return an idle process that still runs, None without one."""
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
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End a process and return its exit code."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        return code


def _exchanged(process: subprocess.Popen[bytes], said: bytes, wall_s: float) -> bytes:
    """Return the process's answer, incomplete if it has ended. Raises OSError, and TimeoutError after killing a process
    that did not answer within `wall_s` seconds.
    """
    assert process.stdin is not None and process.stdout is not None
    answered, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        if not any(answered.wait(wall_s / _CHECKS) for _ in range(_CHECKS)):
            is_late.set()
            process.kill()

    watching = threading.Thread(target=watch, name="tokenizer-watch", daemon=True)
    try:
        watching.start()
    except RuntimeError as error:
        process.kill()
        raise OSError(errno.EAGAIN, "no thread can be started") from error
    try:
        process.stdin.write(said)
        process.stdin.flush()
        return process.stdout.readline()
    finally:
        answered.set()
        watching.join()
        if is_late.is_set():
            raise TimeoutError


def _no_process(error: OSError) -> ServiceError:
    return exhausted("TOKENIZING_LIMIT", f"no process can be started that tokenizes: {error.strerror}", 1.0)
