"""The front end under test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.fake_engine import FakeEngine
from tests.service.running_service import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = tmp_path / "engine.sock"
    with Service(FakeEngine(path), path) as running:
        yield running


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What serves in the process of a test leaves SIGTERM and SIGINT blocked, as it says; every process that a later
    test started would have them blocked, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
