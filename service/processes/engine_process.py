"""The engine as a child process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.log_output import LogOutput
from runahead.runtime.process_end import described
from runahead.runtime.wire.engine_config import EngineConfig
from runahead.service.processes.interrupts import started
from runahead.service.processes.socket_folder import SocketFolder

_READY: Final = b"ready"
ENGINE_MODULE: Final = "runahead.runtime.process.main"
# -P: no file in the current directory can replace a module.
COMMAND: Final = (sys.executable, "-P", "-m", ENGINE_MODULE)


class EngineStartError(RuntimeError):
    """The engine's process ended before it was ready; its reason is on standard error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the engine could not start ({described(exit_code)}); the reason is in its log above")
        self.exit_code = exit_code


class EngineProcess:
    """A running engine, its socket's folder, and the pipe whose end tells it that its parent is gone.

    Spawned, never forked from a process with gRPC. It logs to this process's standard error. device: the detected or
    configured one, known when it is ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: SocketFolder) -> None:
        self._process = process
        self._folder = folder
        self.device = ""

    @property
    def socket(self) -> Path:
        """The engine's socket, in a folder that only this user can enter."""
        return self._folder.socket

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        log: LogOutput,
        command: Sequence[str] = COMMAND,
        dropped_lines: tuple[int, int] | None = None,
    ) -> EngineProcess:
        """Start the engine; returns when it listens. A cancelled start leaves nothing behind.

        dropped_lines: where it counts dropped log lines, as a file descriptor and the index of a 64-bit word.

        Raises ConfigError without a folder for its socket, and EngineStartError.
        """
        folder = SocketFolder.make()
        try:
            process = await started(command, () if dropped_lines is None else dropped_lines[:1])
        except BaseException:
            folder.remove()
            raise
        engine = cls(process, folder)
        try:
            await engine._greet({"config": config, "log": log, "dropped_lines": dropped_lines})
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the process's end and return its exit code."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill an engine that does not react. `wait` returns when it has ended."""
        if not self.has_ended:
            self._process.kill()

    def ask_to_stop(self) -> None:
        """Ask the engine to drain and end. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, grace_s: float) -> int:
        """Ask the engine to stop, and kill it after `grace_s` seconds. Returns its exit code. Idempotent."""
        self.ask_to_stop()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        finally:
            self._folder.remove()
        return await self._process.wait()

    async def _greet(self, orders: dict[str, object]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(
            msgspec.json.encode({"socket": str(self.socket), "parent": os.getpid(), **orders}) + b"\n"
        )
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise EngineStartError(await self._process.wait()) from None
        ready, _, device = (await self._process.stdout.readline()).strip().partition(b" ")
        if ready != _READY:
            raise EngineStartError(await self._process.wait())
        self.device = device.decode("ascii", "replace")
