"""The engine as a child process, and the folder of its socket.

The folder is accessible to this user only. Its maker holds a lock that ends with the process. An unlocked folder was
left by killed processes: the next start removes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from runahead.runtime.log_output import LogOutput
from runahead.runtime.process_end import described
from runahead.runtime.wire.engine_config import ConfigError, EngineConfig
from runahead.service.processes.interrupts import started

_PREFIX: Final = "runahead-engine-"
_SOCKET: Final = "engine.sock"
_MAX_SOCKET_BYTES: Final = 103  # macOS's bound of a Unix socket's path; Linux allows 107
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp")

_READY: Final = b"ready"
ENGINE_MODULE: Final = "runahead.runtime.process.main"
# -P: no file in the current directory can replace a module.
COMMAND: Final = (sys.executable, "-P", "-m", ENGINE_MODULE)


class SocketFolder:
    """A new folder, locked until it is removed. Use `SocketFolder.make`."""

    def __init__(self, path: Path, lock: int) -> None:
        self._path = path
        self._lock = lock

    @property
    def socket(self) -> Path:
        """The engine's socket."""
        return self._path / _SOCKET

    @classmethod
    def make(cls) -> SocketFolder:
        """Make a folder among the temporary files, or in a shorter path if the socket's would be too long. Removes
        abandoned folders there.

        Raises ConfigError.
        """
        try:
            temporary = tempfile.gettempdir()
        except FileNotFoundError as error:
            raise ConfigError("no folder for temporary files can be written to; set TMPDIR to one that can") from error
        parents = dict.fromkeys((temporary, *_SHORT_FOLDERS))
        for parent in parents:
            _remove_what_was_left(Path(parent))
        for parent in parents:
            with suppress(OSError):
                while (made := cls._made_in(parent)) is None:
                    pass
                if _can_hold_a_socket(made._path):
                    return made
                made.remove()
        raise ConfigError(
            f"the engine's socket has no place: in {temporary!r}, the folder for temporary files, its path would be "
            f"longer than {_MAX_SOCKET_BYTES} bytes, and {' and '.join(_SHORT_FOLDERS)} can't be written to; set "
            "TMPDIR to a shorter folder"
        )

    def remove(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            _remove(self._path)
            os.close(self._lock)
            self._lock = -1

    @classmethod
    def _made_in(cls, parent: str) -> SocketFolder | None:
        """Make a folder in this parent. None if another start removed it before it was locked. Raises OSError."""
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return None
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink == 0 or not path.is_dir():
            os.close(lock)
            return None
        return cls(path, lock)


def _remove_what_was_left(parent: Path) -> None:
    """Remove this user's unlocked folders."""
    with suppress(OSError):
        for path in parent.glob(_PREFIX + "*"):
            with suppress(OSError):
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    """Remove a folder. Raises OSError if that fails or the folder is locked."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(folder)
        if about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
    finally:
        os.close(folder)


def _remove(path: Path) -> None:
    """Remove the socket and the folder, and nothing else in it."""
    with suppress(OSError):
        (path / _SOCKET).unlink(missing_ok=True)
        path.rmdir()


def _can_hold_a_socket(folder: Path) -> bool:
    try:
        return len(str(folder / _SOCKET).encode("utf-8")) <= _MAX_SOCKET_BYTES  # as passed to the engine
    except UnicodeEncodeError:
        return False


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
