"""Files that are read again when they change, while what they held before stays in force until then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from runahead.runtime.wire.engine_config import ConfigError

Contents = TypeVar("Contents")
Signature = tuple[tuple[int, ...] | None, ...]

log = structlog.get_logger(__name__)


class UnreadableError(ConfigError):
    """A file could not be read, for a reason that may pass without a change to it: no descriptor was free, say."""


class WatchedFiles(Generic[Contents]):
    """What some files hold, as they were when they could last be used. Any thread may ask.

    read: reads all of `paths`. Raises UnreadableError, or ConfigError for contents that can't be used.
    failure: the event that is logged, once for each reason and state of the files, when they can't be used later on.
    Raises ConfigError where they can't be used at first.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Contents], failure: str) -> None:
        self._paths = paths
        self._read = read
        self._failure = failure
        self._lock = threading.Lock()
        self._seen: Signature | None = None  # of what was last read; None reads again at the next call
        self._told: tuple[Signature, set[str]] = (), set()
        self._contents = self._read_whole()

    @property
    def contents(self) -> Contents:
        """What is in force."""
        return self._contents

    def look(self) -> bool:
        """Reads files that have changed, or could not be read before. Whether other contents are in force now."""
        with self._lock:
            now = _signature(self._paths)
            if now == self._seen:
                return False
            try:
                self._contents = self._read_whole()
            except ConfigError as error:
                self._tell(now, str(error))
                return False
            return True

    def _tell(self, signature: Signature, why: str) -> None:
        if self._told[0] != signature:
            self._told = signature, set()
        if why not in self._told[1]:
            self._told[1].add(why)
            log.error(self._failure, why=why)

    def _read_whole(self) -> Contents:
        """Once more if the files changed meanwhile, since a part may be of before. Raises ConfigError."""
        self._seen = None
        for _ in range(2):
            before = _signature(self._paths)
            outcome = self._outcome()
            if _signature(self._paths) == before:
                break
        else:
            raise UnreadableError(f"{', '.join(map(str, self._paths))} can't be read: the files change all the while")
        if isinstance(outcome, UnreadableError):
            raise outcome
        self._seen = before
        if isinstance(outcome, ConfigError):
            raise outcome
        return outcome

    def _outcome(self) -> Contents | ConfigError:
        try:
            return self._read()
        except ConfigError as error:
            return error


def _signature(paths: Sequence[Path]) -> Signature:
    """Changes when a file is written to, replaced (by way of a link too), or its permissions change."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, ...] | None:
    """None for one that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    # A writer can set the time of modification back, as `cp -p` does; the time of the change it can't.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
