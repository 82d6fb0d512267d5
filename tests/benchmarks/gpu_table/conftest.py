"""Engines that are measured in the process of the tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def frozen_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The garbage collector goes on to pass over what the tests have imported. An engine that is measured freezes what
    there is, and undoes that when it ends."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append(-1))
    yield
    assert sum(frozen) == 0, "an engine has left everything frozen"
