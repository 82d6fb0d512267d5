"""A tokenizer with expressions that may take any time: its processes answer as the library does, within bounds."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, normalizers

from runahead.service.contract.errors import ServiceError
from runahead.service.text import bounded_tokenizer
from runahead.service.text.bounded_tokenizer import BoundedTokenizer
from runahead.service.text.tokenizer import TextTokenizer
from runahead.service.text.tokenizer_process import Description
from runahead.service.workers.worker_process import WorkerProcess
from tests.service.small_tokenizers import byte_level_tokenizer, panicking_tokenizer

IMPATIENT = "from runahead.service.text import tokenizer_process as process\nprocess.PROCESSOR_S = 0.3\nprocess.main()"
SLOW = ("a" * 19 + "c") * 800  # each piece is looked at for about as long as the library allows, and none fails


class Changed(BoundedTokenizer):
    """With processes that run another program."""

    def __init__(self, of: Tokenizer, program: str) -> None:
        super().__init__(of.to_str())
        self._program = program

    def _new_worker(self) -> WorkerProcess:
        worker = super()._new_worker()
        worker.command = (sys.executable, "-P", "-c", self._program)
        return worker


def run(body: Callable[[BoundedTokenizer], Awaitable[None]], of: Tokenizer | None = None, program: str = "") -> None:
    async def closed_behind() -> None:
        bounded = Changed(of or panicking_tokenizer(), program or IMPATIENT)
        try:
            async with asyncio.timeout(60):
                await body(bounded)
        finally:
            await bounded.close()

    asyncio.run(closed_behind())


def process_of(bounded: BoundedTokenizer) -> asyncio.subprocess.Process:
    """Its only one."""
    (worker,) = bounded.workers
    assert worker.process is not None
    return worker.process


async def goes_on(bounded: BoundedTokenizer) -> None:
    assert len(await bounded.encode("word", False)) == 4
    assert len(bounded.workers) == 1


@pytest.mark.parametrize("special", [False, True])
def test_ids_and_texts_are_those_of_the_library(special: bool) -> None:
    library = panicking_tokenizer()

    async def body(bounded: BoundedTokenizer) -> None:
        for text in ("", "words and\nlines", "é€😀 <|end|>", "aab"):
            ids = library.encode(text, add_special_tokens=special).ids
            assert list(await bounded.encode(text, special)) == ids
            assert await bounded.decode(tuple(ids), special) == library.decode(ids, skip_special_tokens=not special)

    run(body)


def test_a_text_with_many_expensive_matches_is_refused_and_the_next_is_not() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        with pytest.raises(ServiceError) as error:
            await bounded.encode(SLOW, True)
        assert error.value.reason == "INVALID_FIELD"
        assert error.value.sentence == "text takes more than 5 s of processor time to be tokenized"
        await goes_on(bounded)

    run(body)


def test_a_panic_ends_no_process() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        await goes_on(bounded)
        process = process_of(bounded)
        with pytest.raises(RuntimeError, match="the tokenizer's library has failed"):
            await bounded.encode("a" * 40, False)
        assert process_of(bounded) is process and process.returncode is None

    run(body)


def test_a_process_that_is_stopped_is_replaced_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        for text in ("word", "long " * 100_000):  # of which the second does not fit into a pipe
            await goes_on(bounded)
            process = process_of(bounded)
            process.send_signal(signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(bounded_tokenizer, "_WALL_S", 0.4)
                with pytest.raises(ServiceError, match=r"did not answer within 0\.4 s") as error:
                    await bounded.encode(text, False)
            assert error.value.reason == "TOKENIZING_LIMIT" and process.returncode == -signal.SIGKILL
        await goes_on(bounded)

    run(body)


def test_a_text_that_needs_too_much_memory_is_refused_and_the_next_is_not() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        with pytest.raises(ServiceError, match="text takes more than 1024 MiB of memory to be tokenized") as error:
            await bounded.encode("word " * 200_000, False)
        assert error.value.reason == "INVALID_FIELD"
        await goes_on(bounded)

    run(body, byte_level_tokenizer(), IMPATIENT.replace("PROCESSOR_S = 0.3", "MEMORY_BYTES = 64 << 20"))


def test_a_process_that_has_ended_meanwhile_is_replaced() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        await goes_on(bounded)
        process = process_of(bounded)
        process.kill()
        await process.wait()
        await goes_on(bounded)
        assert process_of(bounded) is not process

    run(body)


def test_a_process_that_is_killed_at_work_ends_the_call_alone() -> None:
    dies = "import sys, os, signal\nsys.stdin.readline()\nprint('{}', flush=True)\nsys.stdin.readline()\n"
    program = dies + "os.kill(os.getpid(), signal.SIGKILL)"

    async def body(bounded: BoundedTokenizer) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has ended with"):
                await bounded.encode("word", False)

    run(body, program=program)


def test_without_a_descriptor_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def body(bounded: BoundedTokenizer) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", full)
            with pytest.raises(ServiceError, match="the process that tokenizes can't be started") as error:
                await bounded.encode("word", False)
        assert error.value.reason == "TOKENIZING_LIMIT"
        await goes_on(bounded)

    run(body)


def test_calls_at_once_have_a_process_each_and_a_close_ends_those_at_work() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        await asyncio.gather(*(bounded.encode("word", False) for _ in range(2)))
        assert len(bounded.workers) == 2
        processes = [worker.process for worker in bounded.workers]
        calls = [asyncio.ensure_future(bounded.encode(SLOW, False)) for _ in processes]
        await asyncio.sleep(0)
        await bounded.close()
        assert [process and process.returncode for process in processes] == [-signal.SIGKILL] * 2
        assert all(isinstance(end, RuntimeError) for end in await asyncio.gather(*calls, return_exceptions=True))
        with pytest.raises(ServiceError, match="the server is shutting down"):
            await bounded.encode("word", False)

    run(body, program=IMPATIENT.replace("0.3", "60"))


def test_a_closed_one_starts_no_process() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        await bounded.close()
        with pytest.raises(ServiceError, match="the server is shutting down") as error:
            await bounded.encode("word", False)
        assert error.value.reason == "SHUTDOWN"
        assert bounded.workers == []

    run(body)


def test_a_process_that_has_started_when_its_worker_is_closed_is_ended() -> None:
    async def body(bounded: BoundedTokenizer) -> None:
        call = asyncio.ensure_future(bounded.encode("word", False))
        await asyncio.sleep(0)
        assert len(bounded.workers) == 1
        await bounded.close()
        with pytest.raises(ServiceError, match="the server is shutting down"):
            await call
        assert bounded.workers[0].process is None

    run(body)


def test_a_tokenizer_with_unknown_expressions_is_bounded_and_another_is_not() -> None:
    replacing: Tokenizer = byte_level_tokenizer()
    replacing.normalizer = normalizers.Replace(Regex("x+"), "y")

    async def found(of: TextTokenizer) -> tuple[list[int], str, int]:
        try:
            ids = (await of.encode("some x words")).tolist()
            return ids, await of.decode(ids), 0 if of._bounded is None else len(of._bounded.workers)
        finally:
            await of.close()

    for made, processes in ((byte_level_tokenizer(), 0), (replacing, 1), (panicking_tokenizer(), 1)):
        ids = made.encode("some x words").ids
        assert asyncio.run(found(TextTokenizer(made))) == (ids, made.decode(ids), processes)


def test_the_process_ends_with_its_input() -> None:
    command = (sys.executable, "-P", "-m", "runahead.service.text.tokenizer_process")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    said, _ = process.communicate(msgspec.json.encode(Description(byte_level_tokenizer().to_str())) + b"\n")
    assert (process.returncode, said.count(b"\n")) == (0, 1)
