"""What tests of kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory of torch's holds numbers that a kernel must not read."""
    from tests.runtime.kernels.poisoned_memory import poison_new_memory  # imports triton

    poison_new_memory(monkeypatch)
