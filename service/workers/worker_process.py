"""A process that answers a front end's questions, one JSON line each. Started at the first question, ended when it does
not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
import structlog

from runahead.runtime.process_end import end_fields
from runahead.service.contract.errors import SHUTDOWN_SENTENCE
from runahead.service.engine.pulse import running_timeout
from runahead.service.workers.worker_side import Ready

log = structlog.get_logger(__name__)

_START_S: Final = 60.0  # to load its libraries on a busy machine
_ANSWER_BYTES: Final = 8 << 20  # bound of an answer, also from a broken process

T = TypeVar("T")


class UnusableError(Exception):
    """Workers with these orders can never answer. The message is the end of a sentence."""


class WorkerLostError(Exception):
    """There is no answer for a reason other than the question: no process could be started, or none may be any more.
    The message is a sentence.
    """


class WorkerProcess:
    """A process that is asked one question at a time. Use it in one task at a time and close it.

    module: run with `python -m`; it reads its orders, answers `Ready`, then one line for each question. orders: the
        first line. name: in log events. work: what it does, in sentences. environment: its variables;
    None: this process's. answer_bytes: bound of an answer.
    """

    def __init__(
        self,
        module: str,
        orders: msgspec.Struct,
        name: str,
        work: str,
        environment: Mapping[str, str] | None = None,
        answer_bytes: int = _ANSWER_BYTES,
    ) -> None:
        self.command: tuple[str, ...] = (sys.executable, "-P", "-X", "utf8", "-m", module)
        self.process: asyncio.subprocess.Process | None = None
        self._orders = orders
        self._name = name
        self._not_started = f"the process that {work} can't be started"
        self._environment = environment
        self._answer_bytes = answer_bytes
        self._unusable = ""
        self._closed = False

    async def ask(self, question: msgspec.Struct, kind: type[T], within_s: float) -> T | int:
        """Ask a question. Returns the answer, or the exit code if the process ended. within_s: seconds of this
        process's running time.

        Raises UnusableError, WorkerLostError, and TimeoutError after ending the process.
        """
        process = await self.started()
        try:
            async with running_timeout(within_s):
                answer = await _exchange(process, question, kind)
        except TimeoutError:
            await self.end()
            raise
        if answer is not None:
            return answer
        code = await self.end()
        log.info(f"{self._name}_ended_its_process", **end_fields(code))
        return code

    async def started(self) -> asyncio.subprocess.Process:
        """Return a ready process, started if needed. Raises UnusableError and WorkerLostError."""
        if self._unusable:
            raise UnusableError(self._unusable)
        if (process := self.process) is not None:
            if process.returncode is None and not process.stdout.at_eof():  # type: ignore[union-attr]
                return process
            code = await self.end()  # ended while idle, so no question is the reason
            log.info(f"{self._name}_process_ended", **end_fields(code))
        if self._closed:
            raise WorkerLostError(SHUTDOWN_SENTENCE)
        # Ignores a terminal's signals to the group, as this process does.
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=self._answer_bytes,
                env=self._environment,
            )
        except OSError as error:
            log.warning(f"{self._name}_process_not_started", why=error.strerror)
            raise WorkerLostError(self._not_started) from None
        self.process = process
        if self._closed:  # meanwhile
            await self.end()
            raise WorkerLostError(SHUTDOWN_SENTENCE)
        ready = None
        with contextlib.suppress(TimeoutError):
            async with running_timeout(_START_S):
                ready = await _exchange(process, self._orders, Ready)
        if ready is None:
            code = await self.end()
            log.warning(f"{self._name}_process_not_started", **end_fields(code))
            raise WorkerLostError(self._not_started)
        if ready.unusable:
            await self.end()
            self._unusable = ready.unusable
            raise UnusableError(self._unusable)
        if ready.warning:
            log.warning(f"{self._name}_process_less_confined", why=ready.warning)
        return process

    async def end(self) -> int:
        """End the process if there is one. Returns its exit code, 0 without one."""
        process, self.process = self.process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None and not process.stdout.at_eof():  # type: ignore[union-attr]
                process.kill()
        assert process.stdin is not None
        process.stdin.close()
        return await process.wait()

    async def close(self) -> None:
        """End the process for good."""
        self._closed = True
        await self.end()


async def _exchange(process: asyncio.subprocess.Process, said: msgspec.Struct, kind: type[T]) -> T | None:
    """Exchange a question for an answer, None if the process has ended or answers invalidly."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(said) + b"\n")
        await process.stdin.drain()
        return msgspec.json.decode(await process.stdout.readline(), type=kind)
    except (ConnectionError, ValueError):  # an overlong line and invalid JSON are a ValueError
        return None
