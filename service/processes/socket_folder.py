"""The folder of the engine's socket, which only this user can enter.

Its maker removes it, or the engine if its maker was killed. If both are killed at once, a later start does.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError

_PREFIX: Final = "runahead-engine-"
_UNLOCKED: Final = "runahead-folder-"
_SOCKET: Final = "engine.sock"
_MAX_SOCKET_BYTES: Final = 103  # macOS's bound of a Unix socket's path; Linux allows 107
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp")


class SocketFolder:
    """The folder, which is locked before it gets its name and as long as its maker runs."""

    def __init__(self, parent: str) -> None:
        """Make it in `parent`. Raises OSError."""
        folder = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))  # mode 0700
        self._lock = _open(folder)
        with suppress(OSError):  # on a file system without locks every folder stays: a start cannot lock it either
            _lock(self._lock)
        self.socket = folder.rename(folder.with_name(_PREFIX + folder.name.removeprefix(_UNLOCKED))) / _SOCKET

    def remove(self) -> None:
        """Remove the socket and the folder, and nothing else in it. Idempotent."""
        with suppress(OSError):
            self.socket.unlink(missing_ok=True)
            self.socket.parent.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def make_socket_folder() -> SocketFolder:
    """Make a folder among the temporary files, or in a shorter path if the socket's would be too long. Removes folders
    of killed processes. Raises ConfigError.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError("no folder for temporary files can be written to; set TMPDIR to one that can") from error
    for parent in dict.fromkeys((temporary, *_SHORT_FOLDERS)):
        _remove_left_behind(parent)
        with suppress(OSError):
            folder = SocketFolder(parent)
            if _fits(folder.socket):
                return folder
            folder.remove()
    raise ConfigError(
        f"the engine's socket has no place: in {temporary!r}, the folder for temporary files, its path would be "
        f"longer than {_MAX_SOCKET_BYTES} bytes, and {' and '.join(_SHORT_FOLDERS)} can't be written to; set "
        "TMPDIR to a shorter folder"
    )


def _remove_left_behind(parent: str) -> None:
    for left in Path(parent).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            folder = _open(left)
            try:
                _lock(folder)
                with suppress(FileNotFoundError):
                    os.unlink(_SOCKET, dir_fd=folder)
                left.rmdir()
            finally:
                os.close(folder)


def _open(folder: str | Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(folder: int) -> None:
    """Lock a folder until its descriptor is closed. Raises OSError if another process has locked it."""
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _fits(socket: Path) -> bool:
    try:
        return len(str(socket).encode("utf-8")) <= _MAX_SOCKET_BYTES  # as passed to the engine
    except UnicodeEncodeError:
        return False
