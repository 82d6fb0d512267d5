"""A tokenizer with expressions that may take any time: its processes answer as the library does, within bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers

from runahead.service.contract.errors import ServiceError
from runahead.service.text import bounded_tokenizer
from runahead.service.text.bounded_tokenizer import BoundedTokenizer
from runahead.service.text.tokenizer import TextTokenizer
from tests.service.small_tokenizers import byte_level_tokenizer, panicking_tokenizer

IMPATIENT = "from runahead.service.text import tokenizer_process as process\nprocess.PROCESSOR_S = 0.3\nprocess.main()"
SLOW = ("a" * 19 + "c") * 800  # each piece is looked at for about as long as the library allows, and none fails


@pytest.fixture
def bounded() -> Iterator[BoundedTokenizer]:
    tokenizer = BoundedTokenizer(panicking_tokenizer().to_str(), (sys.executable, "-P", "-c", IMPATIENT))
    yield tokenizer
    tokenizer.close()


def refused(tokenizer: BoundedTokenizer) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        tokenizer.encode(SLOW, True)
    return error.value


@pytest.mark.parametrize("special", [False, True])
def test_ids_and_texts_are_those_of_the_library(bounded: BoundedTokenizer, special: bool) -> None:
    library = panicking_tokenizer()
    for text in ("", "words and\nlines", "é€😀 <|end|>", "aab"):
        ids = library.encode(text, add_special_tokens=special).ids
        assert bounded.encode(text, special).tolist() == ids
        assert bounded.decode(ids, special) == library.decode(ids, skip_special_tokens=not special)


def test_a_text_with_many_expensive_matches_is_refused_and_the_next_is_not(bounded: BoundedTokenizer) -> None:
    error = refused(bounded)
    assert error.reason == "INVALID_FIELD"
    assert error.sentence == "text takes more than 5 s of processor time to be tokenized"
    assert bounded.encode("word", False).size == 4
    assert len(bounded._running) == 1


def test_without_a_thread_that_watches_a_process_it_is_ended_and_the_text_is_refused(
    bounded: BoundedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(ServiceError) as error:
            bounded.encode("word", False)
    assert error.value.reason == "TOKENIZING_LIMIT"
    assert not bounded._running
    assert bounded.encode("word", False).size == 4


def test_a_panic_ends_no_process(bounded: BoundedTokenizer) -> None:
    bounded.encode("word", False)
    (process,) = bounded._running
    with pytest.raises(RuntimeError, match="the tokenizer's library has failed"):
        bounded.encode("a" * 40, False)
    assert bounded._running == {process} and process.poll() is None


def test_a_process_that_is_stopped_is_replaced_after_its_time(bounded: BoundedTokenizer) -> None:
    bounded.encode("word", False)
    (process,) = bounded._running
    process.send_signal(signal.SIGSTOP)
    bounded._wall_s = 0.4
    for text in ("word", "long " * 100_000):  # of which the second does not fit into a pipe
        with pytest.raises(ServiceError, match=r"a process that tokenizes did not answer within 0\.4 s") as error:
            bounded.encode(text, False)
        assert error.value.reason == "TOKENIZING_LIMIT" and process.returncode == -signal.SIGKILL
        bounded._wall_s = bounded_tokenizer.WALL_S
        assert bounded.encode("word", False).size == 4
        (process,) = bounded._running
        process.send_signal(signal.SIGSTOP)
        bounded._wall_s = 0.4


def test_a_text_that_needs_too_much_memory_is_refused_and_the_next_is_not() -> None:
    hungry = "process.MEMORY_BYTES = 64 << 20\nprocess.main()"
    program = IMPATIENT.replace("process.PROCESSOR_S = 0.3\nprocess.main()", hungry)
    bounded = BoundedTokenizer(byte_level_tokenizer().to_str(), (sys.executable, "-P", "-c", program))
    try:
        with pytest.raises(ServiceError, match="text takes more than 1024 MiB of memory to be tokenized") as error:
            bounded.encode("word " * 200_000, False)
        assert error.value.reason == "INVALID_FIELD"
        assert bounded.encode("word", False).size == 4
    finally:
        bounded.close()


def test_a_process_that_has_ended_meanwhile_is_replaced(bounded: BoundedTokenizer) -> None:
    bounded.encode("word", False)
    (process,) = bounded._running
    process.kill()
    process.wait()
    assert bounded.encode("word", False).size == 4
    assert process not in bounded._running and len(bounded._running) == 1


def test_a_process_that_is_killed_at_work_ends_the_call_alone(bounded: BoundedTokenizer) -> None:
    program = "import sys, os, signal\nsys.stdin.readline()\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGKILL)"
    lost = BoundedTokenizer(byte_level_tokenizer().to_str(), (sys.executable, "-c", program))
    with pytest.raises(RuntimeError, match="has ended with"):
        lost.encode("word", False)
    assert not lost._running


def test_without_a_descriptor_a_call_is_refused(bounded: BoundedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(ServiceError, match="no process can be started that tokenizes: Too many open files"):
        bounded.encode("word", False)


def test_a_close_ends_processes_that_are_at_work() -> None:
    bounded = BoundedTokenizer(panicking_tokenizer().to_str())
    bounded.encode("word", False)
    (process,) = bounded._running
    bounded._idle.clear()  # it is at work from here on
    found = list[BaseException]()

    def work() -> None:
        try:
            bounded.encode(SLOW, False)
        except RuntimeError as error:
            found.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded, "_idle_one", lambda: process)
        thread = threading.Thread(target=work)
        thread.start()
        bounded.close()
        thread.join()
    assert process.returncode == -signal.SIGKILL and len(found) == 1 and not bounded._running
    with pytest.raises(RuntimeError, match="closed"):
        bounded.encode("word", False)


def test_a_tokenizer_with_unknown_expressions_is_bounded_and_another_is_not() -> None:
    replacing: Tokenizer = byte_level_tokenizer()
    replacing.normalizer = normalizers.Replace(Regex("x+"), "y")

    async def ids(of: TextTokenizer) -> tuple[list[int], int]:
        try:
            found = (await of.encode("some x words")).tolist()
            return found, 0 if of._bounded is None else len(of._bounded._running)
        finally:
            of.close()

    for made, processes in ((byte_level_tokenizer(), 0), (replacing, 1), (panicking_tokenizer(), 1)):
        assert asyncio.run(ids(TextTokenizer(made))) == (made.encode("some x words").ids, processes)


def test_the_process_ends_with_its_input() -> None:
    process = subprocess.Popen(bounded_tokenizer.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.communicate(
        b'"' + byte_level_tokenizer().to_str().replace("\\", "\\\\").replace('"', '\\"').encode() + b'"\n'
    )
    assert process.returncode == 0
