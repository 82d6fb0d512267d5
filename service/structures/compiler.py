"""The front end's side of its compile process: started when it is needed, ended when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import Final, TypeVar

import msgspec
import structlog

from runahead.runtime.process_end import end_fields
from runahead.service.contract.errors import ServiceError, no_structure
from runahead.service.contract.limits import LIMITS
from runahead.service.contract.structure import StructureSource
from runahead.service.engine.running_time import running_timeout
from runahead.service.structures.orders import Answer, Ask, Ready, Vocabulary

log = structlog.get_logger(__name__)

COMPILE_MODULE: Final = "runahead.service.structures.compile_process"
COMMAND: Final = (sys.executable, "-P", "-m", COMPILE_MODULE)
_START_S: Final = 60.0  # to load the library and the model's tokens, on a machine that is busy
_WALL: Final = 20  # times its processor time, which a structure may take on a machine that is busy
_NOT_STARTED: Final = "the process that compiles structures can't be started"
_LINE_BYTES: Final = 8 << 20  # of an answer, whatever the process has become

T = TypeVar("T")


class Compiler:
    """One process, which compiles one structure at a time. To be used by one task at a time, and closed.

    vocabulary: the model's tokens, and what a structure may take.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: asyncio.subprocess.Process | None = None
        self._unusable = ""
        self._closed = False

    async def compile(self, source: StructureSource) -> Answer:
        """What the process makes of a structure, or why it was ended.

        Raises ServiceError: FAILED_PRECONDITION where the model's tokens can't be used, UNAVAILABLE where no process
        can be started, and where one did not answer in time though it took little of the processor's, or was ended.
        """
        process = await self._started()
        ask = Ask(source.kind, source.text, LIMITS.structure_depth)
        try:
            async with running_timeout(_WALL * self._vocabulary.compile_s):
                answer = await _exchange(process, ask, Answer)
        except TimeoutError:
            await self._end(process)
            raise _unavailable("a structure was not compiled in time") from None
        if answer is not None and not answer.is_last:
            return answer
        code = await self._end(process)
        if answer is not None:
            return answer
        log.info("structure_ended_its_process", **end_fields(code))
        return Answer(sentence=self._why(code))

    async def close(self) -> None:
        """Ends the process. There is no other any more."""
        self._closed = True
        if self._process is not None:
            await self._end(self._process)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._unusable:
            raise no_structure(self._unusable)
        if (process := self._process) is not None:
            if process.returncode is None and not process.stdout.at_eof():  # type: ignore[union-attr]
                return process
            code = await self._end(process)  # while it was asked for nothing: that is no structure's fault
            log.info("structure_process_ended", **end_fields(code))
        if self._closed:
            raise _unavailable("the server is shutting down")
        # What a terminal sends to all of a group it ignores, as this process does.
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            log.warning("structure_process_not_started", why=error.strerror)
            raise _unavailable(_NOT_STARTED) from None
        self._process = process
        ready = None
        try:
            async with running_timeout(_START_S):
                ready = await _exchange(process, self._vocabulary, Ready)
        except TimeoutError:
            pass
        if ready is None:
            code = await self._end(process)
            log.warning("structure_process_not_started", **end_fields(code))
            raise _unavailable(_NOT_STARTED)
        if ready.unusable:
            await self._end(process)
            self._unusable = ready.unusable
            raise no_structure(self._unusable)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code."""
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None and not process.stdout.at_eof():  # type: ignore[union-attr]
                process.kill()
        assert process.stdin is not None
        process.stdin.close()
        return await process.wait()

    def _why(self, code: int) -> str:
        """What is wrong with the structure that has ended the process. Raises ServiceError where it was not that."""
        if code == -signal.SIGPROF:
            return f"takes more than {self._vocabulary.compile_s:g} s of processor time to be compiled"
        if code == -signal.SIGABRT:  # what the library does where it is refused memory
            return f"needs more than {self._vocabulary.memory_mb} MiB of memory to be compiled"
        if code == -signal.SIGSEGV:
            return "needs more of the stack than there is to be compiled"
        raise _unavailable("the process that compiled the request's structure was ended")


async def _exchange(process: asyncio.subprocess.Process, said: msgspec.Struct, kind: type[T]) -> T | None:
    """What the process answers; None where it has ended, or says what it can't."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(said) + b"\n")
        await process.stdin.drain()
        return msgspec.json.decode(await process.stdout.readline(), type=kind)
    except (ConnectionError, ValueError):  # a line that is too long, and what is no JSON, are a ValueError
        return None


def _unavailable(sentence: str) -> ServiceError:
    return ServiceError("STRUCTURE_LOST", f"{sentence}; the request may be sent again")
