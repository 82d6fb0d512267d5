"""Files that are read again when they change; the previous contents stay in force until then."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

import structlog

from runahead.runtime.wire.engine_config import ConfigError

Contents = TypeVar("Contents")
Signature = tuple[tuple[int, ...] | None, ...]

_CHECK_S: Final = 0.2  # a caller waits for a check: a hanging file system must not block an event loop

log = structlog.get_logger(__name__)


class UnreadableError(ConfigError):
    """A file could not be read for a reason that may pass without a change, such as a lack of descriptors."""


def read_regular(path: Path, most: int) -> bytes:
    """Read at most `most` bytes of a file. Raises UnreadableError, also for a pipe or a device, which could block."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            kind = os.fstat(number).st_mode
            if stat.S_ISDIR(kind) or stat.S_ISREG(kind):
                return file.read(most)
    except OSError as error:
        raise UnreadableError(f"{path} can't be read: {error.strerror}") from error
    raise UnreadableError(f"{path} can't be read: it is not a regular file")


class WatchedFiles(Generic[Contents]):
    """The contents of some files when they were last valid. Thread-safe.

    A separate thread checks the files and may hang with their file system.

    read: reads all of `paths`. Raises UnreadableError, or ConfigError for invalid contents.
    failure: the event logged when later contents are invalid, once for each reason and state of the files. Raises
        ConfigError if the files are invalid at first.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Contents], failure: str) -> None:
        self._paths = paths
        self._read = read
        self._failure = failure
        self._lock = threading.Lock()  # of callers
        self._seen: Signature | None = None  # when last read; None forces a read
        self._told: tuple[Signature, set[str]] = (), set()
        self._contents = self._read_whole()
        self._is_new = False  # no caller has seen the contents yet
        self._is_checked = threading.Event()
        self._is_checked.set()
        self._is_late = False
        work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._work = work
        threading.Thread(target=_carry_out, args=(work,), name="watched-files", daemon=True).start()
        weakref.finalize(self, work.put, None)

    @property
    def contents(self) -> Contents:
        """The contents in force."""
        return self._contents

    def refresh(self) -> bool:
        """Read files that changed or were unreadable, and return whether the contents changed.

        Waits at most `_CHECK_S`, and not at all if an earlier check is still running.
        """
        with self._lock:
            if begins := self._is_checked.is_set():
                self._is_checked.clear()
                self._work.put(self._check)
            is_late = not self._is_checked.wait(_CHECK_S if begins else 0.0)
            if is_late and not self._is_late:
                log.error(
                    self._failure, why=f"{', '.join(map(str, self._paths))} can't be read: no answer in {_CHECK_S} s"
                )
            self._is_late = is_late
            if is_late:
                return False
            is_new, self._is_new = self._is_new, False
            return is_new

    def _check(self) -> None:
        """Check the files, on the separate thread."""
        try:
            now = _signature(self._paths)
            if now != self._seen:
                try:
                    self._contents = self._read_whole()
                    self._is_new = True
                except ConfigError as error:
                    self._tell(now, str(error))
        finally:
            self._is_checked.set()

    def _tell(self, signature: Signature, why: str) -> None:
        if self._told[0] != signature:
            self._told = signature, set()
        if why not in self._told[1]:
            self._told[1].add(why)
            log.error(self._failure, why=why)

    def _read_whole(self) -> Contents:
        """Read the files, again if they changed meanwhile, because the read may mix versions. Raises ConfigError."""
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


def _carry_out(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (check := work.get()) is not None:
        check()
        del check  # the reference would keep the object and this thread alive


def _signature(paths: Sequence[Path]) -> Signature:
    """Make a signature that changes when a file is written, replaced (also through a link), or its permissions
    change.
    """
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, ...] | None:
    """Return a file's signature, None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    # A writer can reset the modification time (`cp -p`), but not the time of the status change.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
