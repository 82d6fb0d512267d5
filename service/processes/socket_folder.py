"""The folder of the engine's socket, which only this user can enter.

Its maker removes it, or the engine if its maker was killed. A folder stays behind only if both are killed at once.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from runahead.runtime.wire.engine_config import ConfigError

_PREFIX: Final = "runahead-socket-"
_SOCKET: Final = "engine.sock"
_MAX_SOCKET_BYTES: Final = 103  # macOS's bound of a Unix socket's path; Linux allows 107
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp")


def make_socket_folder() -> Path:
    """Make a folder among the temporary files, or in a shorter path if the socket's would be too long, and return the
    socket's path in it. Raises ConfigError.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError("no folder for temporary files can be written to; set TMPDIR to one that can") from error
    for parent in dict.fromkeys((temporary, *_SHORT_FOLDERS)):
        with suppress(OSError):
            socket = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent), _SOCKET)  # mode 0700
            if _fits(socket):
                return socket
            remove_socket_folder(socket)
    raise ConfigError(
        f"the engine's socket has no place: in {temporary!r}, the folder for temporary files, its path would be "
        f"longer than {_MAX_SOCKET_BYTES} bytes, and {' and '.join(_SHORT_FOLDERS)} can't be written to; set "
        "TMPDIR to a shorter folder"
    )


def remove_socket_folder(socket: Path) -> None:
    """Remove the socket and its folder, and nothing else in it. Idempotent."""
    with suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


def _fits(socket: Path) -> bool:
    try:
        return len(str(socket).encode("utf-8")) <= _MAX_SOCKET_BYTES  # as passed to the engine
    except UnicodeEncodeError:
        return False
