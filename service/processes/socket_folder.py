"""The folder of the engine's socket.

The folder is accessible to this user only. Its maker holds a lock that ends with the process. An unlocked folder was
left by killed processes: the next start removes it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError

_PREFIX: Final = "runahead-engine-"
_SOCKET: Final = "engine.sock"
_MAX_SOCKET_BYTES: Final = 103  # macOS's bound of a Unix socket's path; Linux allows 107
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp")


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
