"""What a part measures, an engine or a service, and what becomes of it when a figure fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from benchmarks.gpu_table.errors import BenchmarkError

# What a figure may fail with. Errors of torch, of devices and of the engine are RuntimeErrors; a process that is gone
# leaves OSErrors.
_FAILURES: Final = (RuntimeError, OSError)
Subject = TypeVar("Subject")
Figure = TypeVar("Figure")


class Measured(Generic[Subject]):
    """Closes what a failed figure has left behind, and opens it again for the next one.

    What is as it was when it was opened is kept: to load a large model and to capture its graphs takes a minute.
    """

    def __init__(
        self, opening: Callable[[], AbstractContextManager[Subject]], is_as_opened: Callable[[Subject], bool]
    ) -> None:
        self.failures: list[str] = []
        self._opening = opening
        self._is_as_opened = is_as_opened
        self._closing = contextlib.ExitStack()
        self._subject: Subject | None = None
        self._why_closed = ""  # for good

    def __enter__(self) -> Self:
        """Opens it. What this raises is the part's own end: nothing could be measured."""
        self._subject = self._closing.enter_context(self._opening())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close()
        else:
            self._closing.__exit__(kind, error, trace)

    @property
    def subject(self) -> Subject:
        """Return what is open. A reference to it keeps its memory, so that it could not be opened again."""
        assert self._subject is not None, "nothing has failed yet"
        return self._subject

    def measure(self, measure: Callable[[Subject], Figure]) -> tuple[Figure | None, str]:
        """The figure; or None, and why there is none."""
        if self._subject is None and not self._why_closed:
            self._open_again()
        if self._subject is None:
            return None, f"after a failure it could not be opened again: {self._why_closed}"
        try:
            return measure(self._subject), ""
        except _FAILURES as error:
            kept = isinstance(error, BenchmarkError) and self._is_as_opened(self._subject)
            reason = _said(error)
        self.failures.append(reason)
        if not kept:
            self._close()
        return None, reason

    def _open_again(self) -> None:
        try:
            self._subject = self._closing.enter_context(self._opening())
        except _FAILURES as error:
            self._why_closed = _said(error)
            self.failures.append(f"it could not be opened again: {self._why_closed}")

    def _close(self) -> None:
        self._subject = None
        try:
            self._closing.close()
        except _FAILURES as error:
            self.failures.append(f"while it was closed: {_said(error)}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
