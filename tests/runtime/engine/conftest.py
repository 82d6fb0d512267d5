"""What several tests of the engine share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

RECURRENT: Final = ("bamba_groups", "qwen3_next")


@pytest.fixture(scope="module", params=RECURRENT)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small checkpoint with recurrent states."""
    from tests.runtime.models.checkpoints import CASES, save  # imports transformers, which few of these tests need

    path = tmp_path_factory.mktemp(request.param)
    save(next(case for case in CASES if case.name == request.param), path)
    return path
