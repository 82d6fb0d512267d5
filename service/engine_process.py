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

from runahead.runtime.log_output import LogOutput
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig

_READY: Final = b"ready"
_SOCKET: Final = "engine.sock"
_MAX_SOCKET_BYTES: Final = 103  # of a Unix socket's path: the bound of macOS; Linux allows 107
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp")
ENGINE_MODULE: Final = "runahead.runtime.process.main"
# -P: nothing in the current directory can stand in for a module.
COMMAND: Final = (sys.executable, "-P", "-m", ENGINE_MODULE)


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
        return self._folder / _SOCKET

    @classmethod
    async def start(cls, config: EngineConfig, log: LogOutput, command: Sequence[str] = COMMAND) -> EngineProcess:
        """Returns when the engine listens. If cancelled, leaves nothing behind.

        Raises ConfigError where there is no folder for its socket, and EngineStartError.
        """
        folder = _socket_folder()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        engine = cls(process, folder)
        try:
            await engine._greet(config, log)
        except BaseException:
            await engine.stop(grace_s=0.0)
            raise
        return engine

    async def wait(self) -> int:
        """The engine's exit code, when it has ended."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> int:
        """Ends the engine: it is asked to stop, and killed after `grace_s` seconds. Returns its exit code.
        Idempotent."""
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

    async def _greet(self, config: EngineConfig, log: LogOutput) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        orders = {"socket": str(self.socket), "config": config, "log": log}
        self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            raise EngineStartError(await self._process.wait()) from None
        line = await self._process.stdout.readline()
        if line.strip() != _READY:
            raise EngineStartError(await self._process.wait())


def _socket_folder() -> Path:
    """A new folder for the engine's socket, that only this user can enter.

    It is made among the temporary files, or in a shorter folder where a socket's path would be too long in there.
    Raises ConfigError where neither is possible.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError("no folder for temporary files can be written to; set TMPDIR to one that can") from error
    for parent in (temporary, *_SHORT_FOLDERS):
        try:
            folder = Path(tempfile.mkdtemp(prefix="runahead-", dir=parent))  # mode 0700
        except OSError:
            continue
        if _can_hold_a_socket(folder):
            return folder
        folder.rmdir()
    raise ConfigError(
        f"the engine's socket has no place: in {temporary!r}, the folder for temporary files, its path would be longer "
        f"than {_MAX_SOCKET_BYTES} bytes, and {' and '.join(_SHORT_FOLDERS)} can't be written to; set TMPDIR to a "
        "shorter folder"
    )


def _can_hold_a_socket(folder: Path) -> bool:
    try:
        return len(str(folder / _SOCKET).encode("utf-8")) <= _MAX_SOCKET_BYTES  # as it goes to the engine
    except UnicodeEncodeError:
        return False
