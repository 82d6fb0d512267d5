"""The engine as a process of its own, a child of this front end."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from runtime.config import EngineConfig

_READY: Final = b"ready"
_COMMAND: Final = (sys.executable, "-m", "runtime.engine_process")


class EngineStartError(RuntimeError):
    """The engine's process ended before it was ready; it has said why on standard error."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the engine could not start (exit code {exit_code}); the reason is in its log above")
        self.exit_code = exit_code


class EngineProcess:
    """A running engine, the folder of its socket, and the pipe whose end tells it that its parent is gone.

    The engine is spawned, never forked from a process that runs gRPC. Its log goes to this process's standard error.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    @property
    def socket(self) -> Path:
        """Where the engine listens, in a folder that only this user can enter."""
        return self._folder / "engine.sock"

    @classmethod
    async def start(cls, config: EngineConfig, command: Sequence[str] = _COMMAND) -> EngineProcess:
        """Returns when the engine listens. Raises EngineStartError. If cancelled, leaves nothing behind."""
        folder = Path(tempfile.mkdtemp(prefix="runahead-"))  # mode 0700
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        engine = cls(process, folder)
        try:
            await engine._greet(config)
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    async def wait(self) -> int:
        """The engine's exit code, when it has ended."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> int:
        """Ends the engine, kindly for `grace_s` seconds. Returns its exit code. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            if self._process.returncode is None:
                self._process.kill()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return await self._process.wait()

    async def _greet(self, config: EngineConfig) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode({"socket": str(self.socket), "config": config}) + b"\n")
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise EngineStartError(await self._process.wait()) from None
        line = await self._process.stdout.readline()
        if line.strip() != _READY:
            raise EngineStartError(await self._process.wait())
