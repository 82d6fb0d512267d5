"""The engine as a process of its own, a child of this front end."""

from __future__ import annotations

import asyncio
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
# -P: nothing in the current directory can stand in for a module.
COMMAND: Final = (sys.executable, "-P", "-m", ENGINE_MODULE)


class EngineStartError(RuntimeError):
    """The engine's process ended before it was ready; it has said why on standard error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the engine could not start ({described(exit_code)}); the reason is in its log above")
        self.exit_code = exit_code


class EngineProcess:
    """A running engine, the folder of its socket, and the pipe whose end tells it that its parent is gone.

    The engine is spawned, never forked from a process that runs gRPC. Its log goes to this process's standard error.
    device: which one it has found or was told, known when it is ready.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: SocketFolder) -> None:
        self._process = process
        self._folder = folder
        self.device = ""

    @property
    def socket(self) -> Path:
        """Where the engine listens, in a folder that only this user can enter."""
        return self._folder.socket

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        log: LogOutput,
        command: Sequence[str] = COMMAND,
        dropped_lines: tuple[int, int] | None = None,
    ) -> EngineProcess:
        """Returns when the engine listens. If cancelled, leaves nothing behind.

        dropped_lines: where it counts lines that its log dropped, as the descriptor of a file and the number of a
        64-bit word in it.

        Raises ConfigError where there is no folder for its socket, and EngineStartError.
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
        """However it did."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """The engine's exit code, when it has ended."""
        return await self._process.wait()

    def kill(self) -> None:
        """Ends an engine that does not listen any more. `wait` says when it has ended."""
        if not self.has_ended:
            self._process.kill()

    def ask_to_stop(self) -> None:
        """It drains, and ends. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, grace_s: float) -> int:
        """Ends the engine: it is asked to stop, and killed after `grace_s` seconds. Returns its exit code.
        Idempotent."""
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
        self._process.stdin.write(msgspec.json.encode({"socket": str(self.socket), **orders}) + b"\n")
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise EngineStartError(await self._process.wait()) from None
        ready, _, device = (await self._process.stdout.readline()).strip().partition(b" ")
        if ready != _READY:
            raise EngineStartError(await self._process.wait())
        self.device = device.decode("ascii", "replace")
