"""The front end under test."""

from __future__ import annotations

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
