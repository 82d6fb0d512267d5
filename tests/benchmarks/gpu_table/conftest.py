"""Engines that are measured in the process of the tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector goes on to pass over what the tests have imported, when an engine ends."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
